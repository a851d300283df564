"""The bundle for a GPU host: FBGEMM's device code, parts that fail, and the limit of its size."""

import json
import struct
import subprocess

from keyedopt.tools import fbgemm_device_code, gpu_bundle


def image(architecture, content, kind=fbgemm_device_code.ELF):
    """Return an image of device code."""
    head = bytearray(32)
    struct.pack_into("<HHIQ", head, 0, kind, 0, len(head), len(content))
    struct.pack_into("<I", head, 28, architecture)
    return bytes(head) + content


def test_only_the_code_that_is_launched_stays(tmp_path):
    kept, other = b"codegen_adam_unweighted_kernel", b"codegen_lamb_unweighted_kernel"
    images = image(90, kept) + image(80, kept) + image(90, other) + image(90, b"text", kind=1)
    container = struct.pack("<IHHQ", fbgemm_device_code.FATBIN_MAGIC, 1, 16, len(images)) + images
    library = tmp_path / "library.so"
    library.write_bytes(b"before--" + container + b"after")
    section = 8, len(container)
    found = fbgemm_device_code.blank_images(library, section, 90)
    assert found == (len(kept), len(kept) + len(other) + 4)
    data = library.read_bytes()
    assert data.count(kept) == 1
    assert other not in data
    assert data[:8] + data[-5:] == b"before--after"
    assert len(data) == 8 + len(container) + 5, "layout and offsets do not change"
    assert fbgemm_device_code.blank_images(library, section, 0)[0] == 0
    assert kept not in library.read_bytes()


def test_a_part_that_fails_is_left_out_with_the_reason(tmp_path, monkeypatch, capsys):
    def wheels(maker):
        """Make a part."""
        (maker.folder / "part").write_bytes(b"12345")
        return "1 wheel"

    def extensions(maker):
        """Fail."""
        raise RuntimeError("no compiler")

    monkeypatch.setattr(gpu_bundle, "PARTS", (wheels, extensions))
    maker = gpu_bundle.Maker(tmp_path, "python", tmp_path)
    assert gpu_bundle.make(maker) == 1
    found = json.loads((tmp_path / "manifest.json").read_text())
    assert (found["wheels"], found["extensions"]) == ("1 wheel", "left out: no compiler")
    assert list(found["files"]) == ["part"]
    assert gpu_bundle.make(maker, ["wheels"]) == 0
    found = json.loads((tmp_path / "manifest.json").read_text())
    assert found["extensions"] == "left out: no compiler", "parts that are not made again keep their entry"
    monkeypatch.setattr(gpu_bundle, "LIMIT", 4)
    assert gpu_bundle.make(maker, ["wheels"]) == 1
    assert "0.0 MiB of at most 0" in capsys.readouterr().out


def test_the_repository_of_earlier_commits_has_no_trees_and_files(tmp_path, monkeypatch):
    root = tmp_path / "root"
    (root / "fused" / "backends" / "triton").mkdir(parents=True)
    (root / "reference").mkdir()
    (root / "reference" / "a.py").write_text("")
    monkeypatch.setattr(gpu_bundle, "ROOT", root)
    monkeypatch.setattr(gpu_bundle, "APART", 1)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    for number in range(3):
        (root / "fused" / "backends" / "triton" / "a.py").write_text(f"{number}")
        gpu_bundle.git("add", ".")
        gpu_bundle.git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", f"{number}")
    folder, scratch = tmp_path / "bundle", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    listed = gpu_bundle.Maker(folder, "python", scratch).commits().split(", ")
    assert listed == gpu_bundle.git("rev-list", "HEAD~1").split()
    command = ["cat-file", "--batch-all-objects", "--batch-check=%(objecttype)"]
    found = subprocess.run(
        ["git", "-C", str(scratch / "history" / "repository"), *command],
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.split() == ["commit"] * 3
