"""Reads rows from Parquet files and Hugging Face datasets, on disk or on the hub.

Promise: only requested columns are read. A missing file, column, split, package or hub raises a
ConfigError that lists what exists instead. Rows hold plain Python values where the format has them.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from millrace.core.errors import ConfigError

Rows = Iterator[tuple[str, dict[str, Any]]]  # (location for error messages, row)
SAVED = ("dataset_info.json", "dataset_dict.json")  # files that save_to_disk writes
_EXTRA = "which is not installed; install millrace[datasets]"


def folder_rows(folder: Path, *, columns: Sequence[str] | None) -> Rows:
    """Read a folder written by `save_to_disk`, or all Parquet files in it in name order."""
    if any((folder / name).is_file() for name in SAVED):
        return _saved_rows(folder, columns=columns)
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise ConfigError(
            f"Task folder {str(folder)!r} holds neither Parquet files nor a dataset that"
            " save_to_disk wrote; check the path."
        )
    return (row for file in files for row in parquet_rows(file, columns=columns))


def parquet_rows(path: Path, *, columns: Sequence[str] | None) -> Rows:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(f"Task file {str(path)!r} needs pyarrow, {_EXTRA}.") from None
    try:
        with pq.ParquetFile(path) as file:
            _check_columns(columns, file.schema_arrow.names, where=str(path))
            number = 0
            for batch in file.iter_batches(columns=columns):
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
    except FileNotFoundError:
        raise ConfigError(f"No task file {str(path)!r}; check the path.") from None
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"Task file {str(path)!r} cannot be read: {error}.") from None


def hub_rows(
    name: str, *, columns: Sequence[str] | None, subset: str | None, split: str | None
) -> Rows:
    """Read a dataset of the hub, or its cached copy."""
    datasets = _datasets(f"Dataset {name!r}")
    try:
        loaded = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(
            f"Dataset {name!r} cannot be loaded from the hub ({type(error).__name__}: {words});"
            " check its name, subset and split, and the network, or save it to disk where there is"
            " one."
        ) from error
    chosen = _one_split(loaded, where=name, example=f"hub:{name}:{subset or 'default'}:SPLIT")
    return _dataset_rows(chosen, columns=columns, where=name)


def _saved_rows(folder: Path, *, columns: Sequence[str] | None) -> Rows:
    datasets = _datasets(f"Task folder {str(folder)!r}")
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"Task folder {str(folder)!r} cannot be read: {error}.") from error
    chosen = _one_split(loaded, where=str(folder), example=f"{folder}/SPLIT")
    return _dataset_rows(chosen, columns=columns, where=str(folder))


def _dataset_rows(dataset: Any, *, columns: Sequence[str] | None, where: str) -> Rows:
    _check_columns(columns, dataset.column_names, where=where)
    if columns is not None:
        dataset = dataset.select_columns(list(columns))
    for number, row in enumerate(dataset):
        yield f"{where}, row {number}", row


def _one_split(loaded: Any, *, where: str, example: str) -> Any:
    """Return the only split, or a dataset without splits as it is."""
    if not isinstance(loaded, dict):
        return loaded
    if len(loaded) > 1:
        raise ConfigError(
            f"{where!r} has the splits {', '.join(loaded)}; add one to the path: {example!r}."
        )
    return next(iter(loaded.values()))


def _check_columns(wanted: Sequence[str] | None, found: Sequence[str], *, where: str) -> None:
    for name in wanted or ():
        if name not in found:
            raise ConfigError(
                f"{where} has no column {name!r}, only {', '.join(found)}; set columns to some of"
                " these."
            )


def _datasets(what: str) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(f"{what} needs datasets, {_EXTRA}.") from None
    return datasets
