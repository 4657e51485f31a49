"""`hyper-parallel ckpt show`: what is inside a checkpoint."""

import fnmatch
from typing import Annotated, Any

import typer

from hyper_parallel.cli.ckpt.reading import Place, open_checkpoint, tensor_bytes
from hyper_parallel.cli.ckpt.terminal import AsJson, counted, print_table, say, say_json, shown_errors, size_text

_MAX_READ = 16 << 20  # bytes of an object of which the beginning is shown


def show(
    place: Place,
    pattern: Annotated[str | None, typer.Argument(help="Only names that fit, as in 'model.*.weight'.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what is inside: names, dtypes, shapes, sizes, chunks, and the layouts at the time of saving."""
    with shown_errors(), open_checkpoint(place) as source:
        entries = [_entry(source, name, *one) for name, one in sorted(source.known().items()) if _fits(name, pattern)]
        objects = [
            {"name": name, "encoding": encoding, "bytes": length, "value": _object_text(source, name, encoding, length)}
            for name, (encoding, length) in sorted(source.objects().items())
            if _fits(name, pattern)
        ]
    if as_json:
        say_json({"kind": source.kind, "tensors": entries, "objects": objects})
        return
    total = size_text(sum(one["bytes"] for one in entries))
    counts = f"{counted(len(entries), 'tensor')} ({total}), {counted(len(objects), 'object')}"
    say(f"{place}: {source.kind}, {counts}")
    rows = [
        [
            f"  {e['name']}",
            f"{e['dtype']}{e['shape']}",
            size_text(e["bytes"]),
            counted(e["chunks"], "chunk"),
            e["layout"] or "",
        ]
        for e in entries
    ]
    print_table(rows)
    print_table([[f"  {one['name']}", one["encoding"], size_text(one["bytes"]), one["value"]] for one in objects])


def _fits(name: str, pattern: str | None) -> bool:
    return pattern is None or fnmatch.fnmatchcase(name, pattern)


def _entry(source: Any, name: str, shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": dtype,
        "shape": list(shape),
        "bytes": tensor_bytes(shape, dtype),
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


def _object_text(source: Any, name: str, encoding: str, length: int) -> str:
    if encoding != "json":
        return f"<{encoding}, not loaded>"
    if length > _MAX_READ:
        return "<large, not loaded>"
    text = source.object_bytes(name).partition(b"\0")[0].decode(errors="replace")
    return text if len(text) <= 80 else f"{text[:80]}..."
