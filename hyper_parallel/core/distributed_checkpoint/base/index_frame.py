"""The frame of a metadata file: its format, version and checksum, without a look at its content."""

from __future__ import annotations

import re

from hyper_parallel.core.distributed_checkpoint.base.checksum import crc32c
from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError

FORMAT = "hyper-parallel checkpoint"
VERSION = 1

FRAME_START = f'{{"format":"{FORMAT}","version":'.encode()
_FRAME = '{{"format":"{}","version":{},"crc32c":"{:08x}","body":{}}}\n'
_PARTS = re.compile(
    rb'\{"format":"([^"]{0,100})","version":([0-9]{1,9}),"crc32c":"([0-9a-f]{8})","body":(.*)\}\n', re.DOTALL
)
# A file in the body; never inside of a string there, where a quote has a backslash before it.
_FILE = re.compile(
    rb'\["([0-9a-f]{20}-r[0-9]{5,10}-[0-9]{3,10}\.safetensors)",([0-9]{1,19}),([0-9]{1,19}),[0-9]{1,10}\]'
)


def framed(body: str) -> bytes:
    """A metadata file with this body."""
    return _FRAME.format(FORMAT, VERSION, crc32c(body.encode()), body).encode()


def stated_sizes(data: bytes, where: str) -> dict[str, int]:
    """The bytes of each file that a metadata file lists, if it has its checksum; none where a newer version wrote it.

    Quick: the rest of its content is not looked at.
    """
    version, _, body = unframed(data, where)
    if version > VERSION:
        return {}
    return {name.decode(): int(header) + int(content) for name, header, content in _FILE.findall(body)}


def unframed(data: bytes, where: str) -> tuple[int, int, bytes]:
    """The version, the checksum and the body of a metadata file, whose checksum is right."""
    parts = _PARTS.fullmatch(data)
    if parts is None:
        raise CorruptCheckpointError(
            f"'{where}' ({len(data)} bytes) is not the metadata of a checkpoint, or it is damaged; load another one"
        )
    name, version, crc, body = parts[1].decode(errors="replace"), int(parts[2]), int(parts[3], 16), parts[4]
    if name != FORMAT:
        raise CorruptCheckpointError(f"'{where}' is of the format {name!r}, where {FORMAT!r} is expected")
    if crc32c(body) != crc:
        raise CorruptCheckpointError(
            f"'{where}' is damaged: its checksum is {crc32c(body):08x} where {crc:08x} was written; load another one"
        )
    if version < VERSION or parts[2] != str(version).encode():
        raise CorruptCheckpointError(f"'{where}' is of the unknown version {parts[2].decode()}; it may be damaged")
    return version, crc, body
