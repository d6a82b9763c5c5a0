"""Export of a run's views as Parquet files for other programs."""

from collections.abc import Sequence
from pathlib import Path

import duckdb

from batchinfer.data.duckdb_sql import file_error, literal
from batchinfer.records import ConfigError
from batchinfer.report.views import VIEWS, open_views
from batchinfer.sanitize import first_line
from batchinfer.whole_files import cannot_write, published


def export_views(run_folders: Sequence[Path], folder: Path) -> list[Path]:
    """Write every view as <folder>/<view>.parquet; each file of an earlier export is replaced atomically.

    Args:
        run_folders: finished runs; with several, every table has the column `run`.
        folder: created if missing.

    Returns:
        The files, in the order of the views.

    Raises:
        ConfigError: a run folder is wrong, or `folder` cannot be written or lies where runs keep their own tables.
    """
    refuse_inside_runs(run_folders, folder)
    files = []
    with open_views(list(run_folders)) as connection:
        for table in VIEWS:
            target = folder / f"{table.name}.parquet"
            try:
                with published(target) as temporary:
                    connection.execute(f"COPY {table.name} TO {literal(temporary)} (FORMAT parquet)")
            except duckdb.Error as error:
                if (failed := file_error(error)) is not None:
                    raise cannot_write(target, failed) from None
                raise ConfigError(
                    f"cannot write {target}: {first_line(error)}; free space, choose another folder, or repeat "
                    "`batchinfer finish`"
                ) from None
            files.append(target)
    return files


def refuse_inside_runs(run_folders: Sequence[Path], target: Path) -> None:
    """Refuse a target among a run's own files, because the run's views would read the result as their own.

    Raises:
        ConfigError: `target` is a run folder or inside one, outside its report/.
    """
    try:
        where = Path(target).resolve()
        roots = [Path(folder).resolve() for folder in run_folders]
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{str(target)!r} cannot be a path: {error}; give another one") from None
    for root in roots:
        if where.is_relative_to(root) and not where.is_relative_to(root / "report"):
            raise ConfigError(
                f"{target} lies among the files of the run in {root}; use {root / 'report'} or another path"
            )
