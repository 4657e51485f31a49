"""`hyper-parallel ckpt`: look into checkpoints, check, compare and convert them. No model, no process group, and, but
for objects that have to be translated, no framework.

Exit status: 0 when all is well, 1 when `verify` or `diff` has found something, 2 when the command could not be done.
"""

import fnmatch
import importlib
import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

app = typer.Typer(
    name="ckpt",
    help="Look into checkpoints, check, compare and convert them.",
    no_args_is_help=True,
    add_completion=False,
)

Place = Annotated[str, typer.Argument(help="A checkpoint: of hyper-parallel, of torch, or a Hugging Face folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


class Kind(str, Enum):
    """What to convert to."""

    ours = "hyper-parallel"
    hugging_face = "hugging-face"


def _part(name: str) -> Any:
    """A module of the library's checkpoints. `hyper_parallel.core` itself would load the framework: it is passed by."""
    front_door = "hyper_parallel.core"
    if front_door not in sys.modules:
        package = importlib.util.find_spec("hyper_parallel")
        assert package is not None and package.submodule_search_locations is not None
        stand_in = types.ModuleType(front_door)
        stand_in.__path__ = [os.path.join(folder, "core") for folder in package.submodule_search_locations]
        sys.modules[front_door] = stand_in
    return importlib.import_module(f"{front_door}.distributed_checkpoint.{name}")


def _say(text: str, err: bool = False) -> None:
    """Print a text. Names in a checkpoint may hold anything, also what would change the terminal."""
    shown = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    typer.echo("".join(shown), err=err)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        _say(f"error: {error}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal; nothing where the output is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _opened(place: str) -> Iterator[Any]:
    source = _part("tensor_source").open_source(place)
    try:
        yield source
    finally:
        source.close()


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _print_table(rows: list[list[str]]) -> None:
    rows = [[cell.replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    for row in rows:
        _say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    total = _part("metadata").dtype_size(dtype)
    for size in shape:
        total *= size
    return total


# ---------------------------------------------------------------------------------------------------------------------


@app.command("ls")
def ls(
    directory: Annotated[str, typer.Argument(help="A folder with checkpoints in it, or one checkpoint.")] = ".",
    as_json: AsJson = False,
) -> None:
    """List the checkpoints in a folder, the oldest first."""
    with _errors():
        described = [_described(place) for place in _checkpoints_in(directory)]
    if as_json:
        _say(json.dumps(described, indent=2))
        return
    if not described:
        _say(f"no checkpoints in '{directory}'")
        return
    rows = [["checkpoint", "kind", "tensors", "objects", "size", "written"]]
    for one in described:
        if one["error"]:
            rows.append([one["path"], one["kind"], "-", "-", "-", f"unreadable: {one['error']}"])
        else:
            counts = [str(one["tensors"]), str(one["objects"]), _size(one["bytes"])]
            rows.append([one["path"], one["kind"], *counts, one["written"] or "-"])
    _print_table(rows)


def _checkpoints_in(directory: str) -> list[str]:
    """The checkpoints in a folder or under a URL, or the one that it is itself."""
    kind_of = _part("tensor_source").kind_of
    ours = [os.fspath(place) for place in _part("cleanup").checkpoints(directory)]
    if _part("storage").storage_for(directory) == "fsspec":
        return ours or ([directory] if _is_whole(directory) else [])
    if kind_of(directory):
        return [directory]
    root = Path(directory.removeprefix("file://"))
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder '{directory}'")
    order = {place: number for number, place in enumerate(ours)}
    found = [str(path) for path in root.iterdir() if path.is_dir() and kind_of(path)]
    return sorted(found, key=lambda place: (order.get(place, -1), place))


def _is_whole(url: str) -> bool:
    """Whether there is a checkpoint at a URL."""
    try:
        with _opened(url):
            return True
    except FileNotFoundError:
        return False


def _described(place: str) -> dict[str, Any]:
    kind = _part("tensor_source").kind_of(place)
    try:
        with _opened(place) as source:
            known = source.known()
            return {
                "path": place,
                "kind": kind,
                "tensors": len(known),
                "objects": len(source.objects()),
                "bytes": sum(_tensor_bytes(*one) for one in known.values()),
                "written": _time_of(place),
                "error": None,
            }
    except (OSError, ValueError, RuntimeError) as error:
        return {"path": place, "kind": kind, "error": str(error)}


def _time_of(place: str) -> str | None:
    """When a checkpoint was written; None where that is not known."""
    try:
        seconds = Path(place.removeprefix("file://")).stat().st_mtime
    except OSError:
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


@app.command("show")
def show(
    place: Place,
    pattern: Annotated[str | None, typer.Argument(help="Only names that fit, as in 'model.*.weight'.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what is inside: names, dtypes, shapes, sizes, chunks, and the layouts at the time of saving."""
    with _errors(), _opened(place) as source:
        entries = [_entry(source, name, *one) for name, one in sorted(source.known().items()) if _fits(name, pattern)]
        objects = [
            {"name": name, "encoding": encoding, "bytes": length, "value": _object_text(source, name, encoding)}
            for name, (encoding, length) in sorted(source.objects().items())
            if _fits(name, pattern)
        ]
    if as_json:
        _say(json.dumps({"kind": source.kind, "tensors": entries, "objects": objects}, indent=2))
        return
    total = _size(sum(one["bytes"] for one in entries))
    counts = f"{_counted(len(entries), 'tensor')} ({total}), {_counted(len(objects), 'object')}"
    _say(f"{place}: {source.kind}, {counts}")
    rows = [
        [
            f"  {e['name']}",
            f"{e['dtype']}{e['shape']}",
            _size(e["bytes"]),
            _counted(e["chunks"], "chunk"),
            e["layout"] or "",
        ]
        for e in entries
    ]
    _print_table(rows)
    _print_table([[f"  {one['name']}", one["encoding"], _size(one["bytes"]), one["value"]] for one in objects])


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _fits(name: str, pattern: str | None) -> bool:
    return pattern is None or fnmatch.fnmatchcase(name, pattern)


def _entry(source: Any, name: str, shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": dtype,
        "shape": list(shape),
        "bytes": _tensor_bytes(shape, dtype),
        "chunks": len(source.boxes(name)),
        "layout": _layout_text(source.layout(name)),
    }


def _layout_text(layout: dict[str, Any] | None) -> str | None:
    if layout is None:
        return None
    names = layout["mesh_dim_names"] or [str(axis) for axis in range(len(layout["mesh_shape"]))]
    mesh = ", ".join(f"{name}={size}" for name, size in zip(names, layout["mesh_shape"], strict=True))
    dims = ", ".join("*".join(names[axis] for axis in axes) or "-" for axes in layout["cuts"])
    return f"[{dims}] on ({mesh})"


def _object_text(source: Any, name: str, encoding: str) -> str:
    if encoding != "json":
        return f"<{encoding}, not loaded>"
    text = source.object_bytes(name).partition(b"\0")[0].decode(errors="replace")
    return text if len(text) <= 80 else f"{text[:80]}..."


@app.command("verify")
def verify(place: Place) -> None:
    """Read every byte and compare it with the checksums; one line for each problem, and status 1, if there are any."""
    with _errors():
        source = _part("tensor_source")
        kind = source.kind_of(place)
        with _progress("verify") as progress:
            if kind == source.OURS:
                problems = _part("stored_files").verify(place, progress=progress)
            else:
                problems = _read_everything(place, progress)
    for problem in problems:
        _say(problem)
    if problems:
        raise typer.Exit(1)
    note = "" if kind == source.OURS else f" as far as can be told: {kind} files have no checksums"
    _say(f"{place}: every byte is sound{note}")


def _read_everything(place: str, progress: Callable[[int, int], None]) -> list[str]:
    """For kinds without checksums: whether all that should be there is."""
    errors = _part("errors")
    problems = []
    try:
        with _opened(place) as source:
            known = source.known()
            total, done = sum(_tensor_bytes(*one) for one in known.values()), 0
            for name, one in known.items():
                try:
                    for offsets, sizes in source.boxes(name):
                        source.view(name, offsets, sizes).tobytes()
                except errors.CorruptCheckpointError as error:
                    problems.append(str(error))
                done += _tensor_bytes(*one)
                progress(done, total)
            for name in source.objects():
                try:
                    source.object_value(name)
                except errors.CorruptCheckpointError as error:
                    problems.append(str(error))
                except ValueError:
                    pass  # more than plain data: not loaded
    except errors.CorruptCheckpointError as error:
        problems.append(str(error))
    return problems


@app.command("diff")
def diff(first: Place, second: Place, as_json: AsJson = False) -> None:
    """Show what differs between two checkpoints, of any kinds; status 1 if anything does."""
    with _errors(), _opened(first) as one, _opened(second) as other, _progress("compare") as progress:
        found = list(_part("compare").compare(one, other, progress))
    if as_json:
        _say(json.dumps([difference._asdict() for difference in found], indent=2))
    elif found:
        _print_table([[name, what] for name, what in found])
    else:
        _say("no differences")
    if found:
        raise typer.Exit(1)


def _rules(mapping: Path | None) -> Any:
    if mapping is None:
        return None
    try:
        return json.loads(mapping.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file '{mapping}' with a mapping") from None
    except ValueError as error:
        raise ValueError(f"'{mapping}' is not JSON: {error}") from None


def _bytes(text: str) -> int:
    """512, 64KiB, 200MiB, 5GiB."""
    number = text.rstrip("KMGTiBkmgtb ")
    unit = text[len(number) :].strip().upper().replace("IB", "").replace("B", "")
    powers = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
    try:
        size = int(float(number) * 1024 ** powers[unit])
    except (ValueError, KeyError):
        raise typer.BadParameter(f"{text!r} is not a size such as 200MiB") from None
    if size < 1:
        raise typer.BadParameter("must be at least 1 byte")
    return size


Only = Annotated[list[str] | None, typer.Option(help="Only names that fit, as in 'model.**'. May be given repeatedly.")]
Strip = Annotated[str, typer.Option(help="A prefix to take off the names, as in 'model.'.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")]
FileSize = Annotated[int | None, typer.Option("--max-file-size", parser=_bytes, help="As in 200MiB.", metavar="SIZE")]


def _check_free(destination: str, overwrite: bool) -> None:
    is_url = _part("storage").storage_for(destination) == "fsspec"
    is_taken = _is_whole(destination) if is_url else _part("tensor_source").kind_of(destination) is not None
    if is_taken and not overwrite:
        raise ValueError(f"there is a checkpoint at '{destination}' already; pass --overwrite to replace it")


@app.command("convert")
def convert(
    source: Place,
    destination: Annotated[str, typer.Argument(help="The folder to write.")],
    to: Annotated[Kind, typer.Option(help="The kind to write.")] = Kind.ours,
    mapping: Annotated[Path | None, typer.Option(help="A JSON file of rules for names and shapes.")] = None,
    only: Only = None,
    strip: Strip = "",
    max_file_size: FileSize = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load pickled objects, which runs the code in them.")
    ] = False,
    skip_objects: Annotated[bool, typer.Option("--skip-objects", help="Leave objects out.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Convert between kinds: torch or Hugging Face to ours, any to Hugging Face."""
    with _errors():
        _check_free(destination, overwrite)
        rewrite = _part("rewrite")
        with _opened(source) as opened, _progress("convert") as progress:
            selection = rewrite.Selection(opened, only or (), strip)
            options: dict[str, Any] = {"mapping": _rules(mapping), "progress": progress}
            if max_file_size is not None:
                options["max_file_bytes"] = max_file_size
            if to is Kind.hugging_face:
                written = rewrite.write_folder(selection, destination, **options)
            else:
                objects = "skip" if skip_objects else "pickle" if allow_pickle else "plain"
                written = rewrite.write_checkpoint(selection, destination, objects=objects, **options)
    if to is Kind.hugging_face and selection.object_names and not skip_objects:
        _say(
            f"left out {_counted(len(selection.object_names), 'object')}: a Hugging Face folder holds tensors only",
            err=True,
        )
    _say(f"{destination}: {_counted(written, 'tensor')} written")


@app.command("reshard")
def reshard(
    source: Place,
    destination: Annotated[str, typer.Argument(help="The folder to write.")],
    mesh: Annotated[str, typer.Option(help="The axes of the mesh, as in 'dp=2,tp=4'.")],
    cut: Annotated[
        list[str] | None,
        typer.Option(help="The axes that cut each dim, as in 'layers.*.weight=tp,None' or '**=dp+tp'. Repeatable."),
    ] = None,
    max_file_size: FileSize = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a checkpoint again, cut as a job on the mesh would cut it. Any checkpoint loads under any layout without
    this; it makes the reads of that job contiguous."""
    with _errors():
        _check_free(destination, overwrite)
        rewrite = _part("rewrite")
        with _opened(source) as opened, _progress("reshard") as progress:
            cuts = rewrite.Cuts(_mesh(mesh), _each_once(_cut(text) for text in cut or ()))
            options = {} if max_file_size is None else {"max_file_bytes": max_file_size}
            selection = rewrite.Selection(opened)
            written = rewrite.write_checkpoint(selection, destination, cuts=cuts, progress=progress, **options)
    _say(f"{destination}: {_counted(written, 'tensor')} written")


def _mesh(text: str) -> dict[str, int]:
    axes = [part.partition("=") for part in text.split(",")]
    if not all(name and size.isdecimal() for name, _, size in axes):
        raise ValueError(f"--mesh {text!r} is not of the form 'dp=2,tp=4'")
    return _each_once((name, int(size)) for name, _, size in axes)


def _each_once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"'{name}' is given twice; give it once")
        found[name] = value
    return found


def _cut(text: str) -> tuple[str, list[str]]:
    pattern, equals, aliases = text.rpartition("=")
    if not equals or not pattern:
        raise ValueError(
            f"--cut {text!r} is not of the form 'name=axis,axis', one for each dim, 'None' for a whole one"
        )
    return pattern, aliases.split(",") if aliases else []
