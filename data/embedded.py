"""The embedded corpus: text that every machine has, so that the first run needs no network.

It is the source of a fixed list of modules of the Python standard library, one document per module. The text
depends on the Python version, so the content's hash is part of the cache's name and of the run's record, and
losses are never compared across machines. A fixed list of whole modules, never trained on, is for validation.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from lingpt.common.errors import UserError
from lingpt.data.corpus import Corpus, Document, Split

# Modules of Python 3.11 to 3.14; a module that this Python lacks is left out (the hash then differs).
VAL_MODULES = """
    calendar cmd fractions ftplib heapq pprint statistics string textwrap uuid
"""
TRAIN_MODULES = """
    _collections_abc _pydecimal _pyio _strptime _weakrefset abc argparse ast base64 bdb bisect bz2
    cProfile code codecs codeop compileall configparser contextlib contextvars copy copyreg csv
    dataclasses datetime decimal difflib dis doctest enum filecmp fileinput fnmatch functools
    genericpath getopt getpass gettext glob graphlib gzip hashlib hmac imaplib inspect io ipaddress
    keyword linecache locale lzma mailbox mimetypes modulefinder netrc ntpath numbers opcode
    operator optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib posixpath
    profile pstats pty pyclbr pydoc queue quopri random reprlib rlcompleter runpy sched secrets
    selectors shelve shlex shutil signal site smtplib socket socketserver ssl stat stringprep struct
    subprocess symtable sysconfig tabnanny tarfile tempfile threading timeit token tokenize trace
    traceback tracemalloc tty turtle types typing warnings wave weakref webbrowser zipapp zipfile
    zipimport asyncio.base_events asyncio.events asyncio.futures asyncio.locks asyncio.queues
    asyncio.runners asyncio.selector_events asyncio.sslproto asyncio.streams asyncio.subprocess
    asyncio.tasks asyncio.transports asyncio.unix_events collections concurrent.futures._base
    concurrent.futures.process concurrent.futures.thread ctypes ctypes.util
    email._header_value_parser email._policybase email.charset email.contentmanager email.feedparser
    email.generator email.header email.headerregistry email.message email.policy email.utils
    html.parser http http.client http.cookiejar http.cookies http.server importlib._bootstrap
    importlib._bootstrap_external importlib.abc importlib.util json json.decoder json.encoder
    logging logging.config logging.handlers multiprocessing.connection multiprocessing.context
    multiprocessing.managers multiprocessing.pool multiprocessing.queues
    multiprocessing.shared_memory multiprocessing.synchronize multiprocessing.util
    unittest.async_case unittest.case unittest.loader unittest.main unittest.mock unittest.result
    unittest.suite urllib.error urllib.parse urllib.request urllib.robotparser wsgiref.handlers
    wsgiref.headers wsgiref.simple_server wsgiref.validate xml.dom.minidom xml.etree.ElementTree
    xml.sax.expatreader xml.sax.handler xml.sax.saxutils xmlrpc.client xmlrpc.server
"""


def embedded_corpus() -> Corpus:
    """The embedded corpus of this Python. Raises `UserError` if the library's source is not installed."""
    train, val = _sources(TRAIN_MODULES.split()), _sources(VAL_MODULES.split())
    digest = hashlib.sha256()
    for text in [*train, "", *val]:
        digest.update(f"{len(text)}:".encode() + text.encode())
    return Corpus(
        name="embedded",
        content_hash=digest.hexdigest(),
        train=_split(train),
        val=_split(val),
        rule=f"held out: the modules {', '.join(VAL_MODULES.split())}",
        bigram_baseline=True,
    )


def _sources(modules: list[str]) -> list[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    candidates = (
        [library / f"{m.replace('.', '/')}.py", library / m.replace(".", "/") / "__init__.py"]
        for m in modules
    )
    found = [path for pair in candidates for path in pair if path.is_file()]
    if 2 * len(found) < len(modules):
        raise UserError(
            f"the source of Python's standard library is not in {library} ({len(found)} of "
            f"{len(modules)} modules found): give text of your own with DATA=<jsonl>"
        )
    return [path.read_text(encoding="utf-8") for path in found]


def _split(texts: list[str]) -> Split:
    def read() -> Iterator[Document]:
        return (Document(text, 1) for text in texts)

    return Split(read, total=len(texts), unit="doc")
