"""Blank device code in FBGEMM's libraries that a run on one architecture does not launch.

The published wheel has every kernel for three architectures and all optimizers, 2.4 GB unpacked. Blanks
compress well, and layout and offsets do not change: the loader of CUDA finds no code for other
architectures.
"""

import mmap
import struct
import subprocess
from pathlib import Path

FATBIN_MAGIC = 0xBA55ED50
#: The kind of an image that is machine code.
ELF = 2
#: Libraries whose kernels training without variable batches or global weight decay does not launch.
LIBRARIES = ("inference", "_vbe", "_gwd", "_dense", "index_select", "embedding_inplace")
#: Names in images of optimizers and options that the benchmarks do not use.
KERNELS = (
    b"_with_counter_",
    b"codegen_none_",
    b"_rowwise_lamb_",
    b"codegen_lamb_",
    b"_lars_sgd_",
    b"_gwd_kernel",
)


def fatbin_section(library: Path) -> tuple[int, int] | None:
    """Return offset and size of the section with device code; None without one."""
    command = ["readelf", "-S", "-W", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in listing.splitlines():
        if ".nv_fatbin" in line:
            fields = line.split("]", 1)[1].split()
            return int(fields[3], 16), int(fields[4], 16)
    return None


def blank_images(library: Path, section: tuple[int, int], architecture: int) -> tuple[int, int]:
    """Blank every image that is not of the architecture or not launched; return bytes kept and blanked.

    Args:
        library: is changed in place.
        section: see `fatbin_section`.
        architecture: whose code stays, such as 90; 0 for none.
    """
    kept = blanked = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        position, end = section[0], section[0] + section[1]
        while position < end:
            if struct.unpack_from("<I", data, position)[0] != FATBIN_MAGIC:
                position += 8
                continue
            _, header, size = struct.unpack_from("<HHQ", data, position + 4)
            image, last = position + header, position + header + size
            while image < last:
                kind, _, image_header, payload = struct.unpack_from("<HHIQ", data, image)
                begin, after = image + image_header, image + image_header + payload
                ours = kind == ELF and struct.unpack_from("<I", data, image + 28)[0] == architecture
                if ours and not any(data.find(name, begin, after) >= 0 for name in KERNELS):
                    kept += payload
                else:
                    data[begin:after] = bytes(payload)
                    blanked += payload
                image = after
            position = last
    return kept, blanked


def blank_unused(folder: Path, architecture: int) -> tuple[int, int]:
    """Blank the unused device code of all libraries in a folder; return bytes kept and blanked."""
    kept = blanked = 0
    for library in sorted(folder.glob("*.so")):
        section = fatbin_section(library)
        if section is not None:
            unused = any(mark in library.name for mark in LIBRARIES)
            one, other = blank_images(library, section, 0 if unused else architecture)
            kept, blanked = kept + one, blanked + other
    return kept, blanked
