"""A hook of MkDocs: links out of docs/ lead to the repository, and the README is the site's first page."""

import posixpath
import re
from pathlib import Path

LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s]+)(\))")
KEPT = (".md", ".png", ".svg")  # what the site has of docs/


def on_page_markdown(markdown, page, config, files):
    source = page.file.src_uri
    folder = posixpath.join("docs", posixpath.dirname(source))
    if source == "index.md":
        markdown, folder = Path("README.md").read_text(encoding="utf-8"), ""

    def resolved(link):
        name, mark, anchor = link[2].partition("#")
        path = posixpath.normpath(posixpath.join(folder, name))
        if path.startswith("docs/") and path.endswith(KEPT):
            here = posixpath.join("docs", posixpath.dirname(source))
            return f"{link[1]}{posixpath.relpath(path, here)}{mark}{anchor}{link[3]}"
        return f"{link[1]}{config.repo_url}/blob/main/{path}{mark}{anchor}{link[3]}"

    return LINK.sub(resolved, markdown)
