"""Data sets of `datasets`, from the Hugging Face hub or a folder; the hub's errors as one line."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lingpt.common.errors import UserError, first_line, one_line
from lingpt.common.files import FULL_DISK, expand
from lingpt.data.corpus import TEXT_KEY, Corpus, Document, Split
from lingpt.data.file_hashes import file_hashes
from lingpt.data.parquet import ROWS, text_reader

if TYPE_CHECKING:
    import datasets

HUB = "hf:"  # what a source on the hub begins with
ADVICE = "train on text of your own with --data.source <path> (make: DATA=<path>), or on `embedded`"


@contextmanager
def hub_errors(what: str, fix: str) -> Iterator[None]:
    """Turns a failed download of `what` into a `UserError` that says how to `fix` it.

    Without a network many classes of error are raised, some of them wrong (huggingface_hub 1.3 raises
    RuntimeError about a closed client on the second try), so whatever is neither "not found" nor a full disk
    counts as no network.
    """
    from datasets.exceptions import DatasetNotFoundError
    from httpx import HTTPError
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        with only_errors("huggingface_hub"):  # not a line for every retry
            yield
    except UserError:  # a ValueError, too, and a line already
        raise
    # A subclass of EntryNotFoundError that means: not in the cache, and no network.
    except LocalEntryNotFoundError:
        raise UserError(_unreachable(what, "no network", fix)) from None
    except (DatasetNotFoundError, RepositoryNotFoundError, EntryNotFoundError, HFValidationError):
        raise UserError(
            f"{what} is neither a path nor on the hub: check the name, log in if it is private, or {fix}"
        ) from None
    except (OSError, RuntimeError, ValueError, HTTPError) as error:
        if getattr(error, "errno", None) in FULL_DISK:
            raise
        raise UserError(_unreachable(what, hub_reason(error), fix)) from None


def _unreachable(what: str, why: str, fix: str) -> str:
    return (
        f"{what} is not in this machine's cache and cannot be had from the Hugging Face hub ({why}): "
        f"go online (and unset HF_HUB_OFFLINE), or {fix}"
    )


def hub_reason(error: Exception) -> str:
    """Why the hub did not answer, in one line; the final error of huggingface_hub 1.3 may not say it.

    It leaves out what `datasets` asked for, so that several data sets have one reason.
    """
    reason = re.sub(r"Couldn't reach '.*' on the Hub \((.*)\)", r"\1", first_line(error))
    return "no network" if "the client has been closed" in reason else reason


@contextmanager
def only_errors(library: str) -> Iterator[None]:
    """Silences a library's log lines but for errors."""
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def check_hub_name(source: str) -> None:
    """UserError if `source`, without `hf:`, names no data set."""
    if not source.partition(":")[0].strip("/ "):
        raise UserError(f"{HUB}{source} names no data set: give {HUB}owner/name, as on the hub")


def hub_corpus(
    source: str,
    text_key: str = TEXT_KEY,
    *,
    clean: Callable[[str, str], str] | None = None,
    cleaning: int = 0,
) -> Corpus:
    """The data set `owner/name[:config[:split]]` of the Hugging Face hub, through `datasets`.

    Its split `train` is trained on, and `validation` (or `valid`, `val`, `dev`) held out if there is one; a
    split that is named is the whole corpus. `clean` makes the text of a row, given it and where it is, for
    errors; `cleaning` is the version of that. Raises UserError.
    """
    name, _, rest = source.partition(":")
    config, _, split = rest.partition(":")
    check_hub_name(source)
    found = _load(name, config)
    rows = next(iter(found.values()))
    sizes = {name: [split.num_examples, split.num_bytes] for name, split in (rows.info.splits or {}).items()}
    revision = Path(rows.cache_files[0]["filename"]).parent.name  # or a hash of the files, of a local folder
    return _rows_corpus(source, found, split, [cleaning, name, config, sizes, revision], text_key, clean)


def _load(name: str, config: str) -> "datasets.DatasetDict":
    import datasets
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    what = f"the data set {name}"
    with hub_errors(what, ADVICE):
        try:
            return datasets.load_dataset(name, config or None)
        except DatasetNotFoundError:
            raise
        except DatasetsError as error:
            cause = error.__cause__ or error
            if getattr(cause, "errno", None) in FULL_DISK:
                raise cause from None
            raise UserError(
                f"{what} cannot be read ({one_line(cause, 400)}): take another, or {ADVICE}"
            ) from None
        except (RuntimeError, ValueError) as error:
            fault = one_line(error, 400)
            if "scripts are no longer supported" in fault:
                raise UserError(
                    f"{what} needs code of its own, which is not run: take a copy in Parquet, or {ADVICE}"
                ) from None
            if fault.startswith(("Config name is missing", "BuilderConfig")):
                known = fault[fault.find("[") : fault.find("]") + 1]
                raise UserError(
                    f"{what} has other configs: give one as hf:{name}:<config> (of {known})"
                ) from None
            raise


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of `datasets` has written this folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def saved_corpus(source: str, text_key: str, cache_dir: Path | None) -> Corpus:
    """The data set that `save_to_disk` has written to the folder `source`, with splits as those of a hub's.

    The files' hashes are cached in `cache_dir`, if given. Raises UserError.
    """
    import datasets
    import pyarrow as pa

    try:
        found = datasets.load_from_disk(str(expand(source)))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise UserError(f"{source} is damaged ({one_line(error)}): save it again") from None
    except IndexError:  # of `datasets`, which writes no file for such a split
        raise UserError(f"{source} has a split without rows: save it again without that split") from None
    splits = found if isinstance(found, dict) else {"train": found}
    files = {name: [Path(file["filename"]) for file in rows.cache_files] for name, rows in splits.items()}
    record = [[name, file_hashes(paths, cache_dir)] for name, paths in files.items()]
    return _rows_corpus(source, splits, "", ["saved", record], text_key, one=f"{source}/<split>")


def _rows_corpus(
    source: str,
    found: "Mapping[str, datasets.Dataset]",
    split: str,
    record: list[Any],
    text_key: str,
    clean: Callable[[str, str], str] | None = None,
    one: str = "hf:owner/name:config:split",
) -> Corpus:
    """The corpus of these splits; of `split` alone, unless it is empty. record: identifies the rows. one: how
    a user names a split."""
    train = split or ("train" if "train" in found or len(found) != 1 else next(iter(found)))
    if train not in found:
        raise UserError(f"{source} has no split {train!r}: name one, as {one} (of {', '.join(found)})")
    val = next((name for name in ("validation", "valid", "val", "dev") if name in found and not split), None)
    record = record + ([split, text_key] if split or text_key != TEXT_KEY else [])
    unused = ", ".join(name for name in found if name not in (train, val))
    held_out = f"held out: its split {val}" if val else "held out: the documents of the lowest hashes"
    return Corpus(
        name=source,
        content_hash=hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest(),
        train=_split(found[train], text_key, f"{source}, split {train}", clean),
        val=_split(found[val], text_key, f"{source}, split {val}", clean) if val else None,
        rule=held_out + (f"; left alone: {unused}" if unused else ""),
    )


def _split(
    rows: "datasets.Dataset", text_key: str, where: str, clean: Callable[[str, str], str] | None
) -> Split:
    columns, texts_of = text_reader(rows.features.arrow_schema, text_key, where)
    whole = [name if name in rows.column_names else name.partition(".")[0] for name in columns]

    def read() -> Iterator[Document]:
        before = 0
        for batch in rows.select_columns(whole).with_format("arrow").iter(ROWS):
            for row, text in enumerate(texts_of(batch, before), before + 1):
                yield Document(clean(text, f"{where}, row {row}") if clean else text, 1)
            before += len(batch)

    return Split(read, total=len(rows), unit="doc")
