"""Writes the table in docs/methods.md from the registry: python docs/methods_table.py"""

from pathlib import Path

from lingpt.models.attention.unified import FORMS

PAGE = Path(__file__).with_name("methods.md")
MARK = "<!-- written by docs/methods_table.py -->\n"


def table() -> str:
    rows = [
        "| `ATTN=unified+form=…` | decay `a_t`, and what else differs | RoPE | paper |",
        "|---|---|---|---|",
    ]
    for name, form in FORMS.items():
        decay = form.decay.replace("|", r"\|")
        rows.append(f"| `{name}` | {decay} | {'yes' if form.rope else ''} | {form.source} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
    _, _, after = rest.partition("\n\n")
    PAGE.write_text(before + mark + table() + "\n" + after, encoding="utf-8")
