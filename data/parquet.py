"""Documents from tables of Arrow: Parquet files, and the rows of `datasets`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lingpt.common.errors import UserError, one_line
from lingpt.common.files import read_errors
from lingpt.data.answer_rows import ANSWERS, NEEDED, read_row
from lingpt.data.corpus import TEXT_KEY_OPTION, Document

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET = ".parquet"
ROWS = 1000  # read at once: some megabytes of text


def read_parquet(path: Path, text_key: str) -> Iterator[Document]:
    """The documents of a Parquet file, a row each; text that is only whitespace counts as empty. Progress is
    in bytes on disk.

    Raises:
        UserError: naming file and row, counted from 1
    """
    import pyarrow as pa
    from pyarrow import parquet

    row = 0
    with read_errors(path):
        size = path.stat().st_size
    try:
        with parquet.ParquetFile(path) as file:
            columns, texts_of = text_reader(file.schema_arrow, text_key, str(path))
            rows = file.metadata.num_rows
            for batch in file.iter_batches(ROWS, columns=columns):
                texts = texts_of(batch, row)
                before, row = row, row + len(texts)
                yield Document(texts[0], size * row // rows - size * before // rows)
                yield from (Document(text, 0) for text in texts[1:])
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path} is damaged or cut off after row {row} ({one_line(error)}): fetch it again"
        ) from None


def text_reader(
    schema: "pa.Schema", text_key: str, where: str
) -> tuple[list[str], Callable[[Any, int], list[str]]]:
    """The columns to read, which may be nested, and a function that makes texts of them: given a table or
    record batch, and the number of rows before its own. `text_key` may be ANSWERS. UserError from both, which
    begins with `where`: of a row, `<where>, row 7 …`."""
    if text_key != ANSWERS:
        path = find_column(schema, text_key, where)
        return [text_key], lambda table, before: column_texts(table, path, where, before)
    names = [name for name in ("messages", "prompt", "completion") if name in schema.names]
    if names in ([], ["prompt"], ["completion"]):
        raise UserError(f"{where} has no {ANSWERS} (it has {', '.join(schema.names)}): {NEEDED}")

    def rows(table: Any, before: int) -> list[str]:
        try:
            values = table.to_pylist()
        except UnicodeDecodeError:
            first, last = before + 1, before + len(table)
            raise UserError(f"{where}, rows {first} to {last} are not all UTF-8: write them again") from None
        return [read_row(row, f"{where}, row {number}") for number, row in enumerate(values, before + 1)]

    return names, rows


def find_column(schema: "pa.Schema", text_key: str, where: str) -> list[str]:
    """The path of the column `text_key`, or of `b` in the struct `a` if `text_key` is `a.b`. UserError, which
    begins with `where`, if there is none, or if it holds no text."""
    import pyarrow as pa

    path = [text_key] if text_key in schema.names else text_key.split(".")
    kind: Any = pa.struct(schema)
    for part in path:
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            known = ", ".join(schema.names)
            raise UserError(
                f"{where} has no column {text_key!r} (it has {known}): give another with "
                f"{TEXT_KEY_OPTION}, or --data.rows answers"
            )
        kind = kind.field(part).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(
            f"{where} has {kind} in its column {text_key!r}, not text: give another with {TEXT_KEY_OPTION}"
        )
    return path


def column_texts(table: Any, path: list[str], where: str, before: int) -> list[str]:
    """The texts in the column at `path` of a table or record batch; "" for those of whitespace only.

    before: the number of rows before the table's, for errors: `<where>, row 7 …`
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.column(path[0])
    for part in path[1:]:
        column = pc.struct_field(column, part)
    if column.null_count:
        row = before + 1 + pc.index(pc.is_null(column), True).as_py()
        raise UserError(
            f"{where}, row {row} has a null text: every row must have a string {'.'.join(path)!r}"
        )
    if pa.types.is_dictionary(column.type):
        column = pc.cast(column, pa.large_string())
    try:
        texts = column.to_numpy(zero_copy_only=False).tolist()  # several times as fast as to_pylist()
    except pa.ArrowException:  # its readers do not check the encoding
        raws = enumerate(pc.cast(column, pa.large_binary()).to_pylist(), before + 1)
        row = next(row for row, raw in raws if raw.decode(errors="ignore").encode() != raw)
        raise UserError(f"{where}, row {row} is not UTF-8: write the file again, as UTF-8") from None
    return ["" if text.isspace() else text for text in texts]
