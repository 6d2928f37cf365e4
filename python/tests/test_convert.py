"""Import of folders of DCP, and export back."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import launch

import rapidraid
from rapidraid import errors

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
adapter = pytest.importorskip("rapidraid.torch")

from rapidraid._convert import export_dcp, import_dcp, load_dcp_folder, run  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    weights = {"a.weight": torch.randn(40, 30, generator=generator), "b": torch.randn(7, generator=generator).bfloat16()}
    return {"model": weights, "step": 7, "list": [torch.ones(3), {"x": torch.zeros(0)}], "lr": 0.5, "name": "x"}


def folder_of(value: dict[str, Any], folder: Path) -> Path:
    dcp.save(value, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


def flat(value: dict[str, Any]) -> dict[str, Any]:
    found, _ = dcp._nested_dict.flatten_state_dict(value)
    return {name: entry.tolist() if isinstance(entry, torch.Tensor) else entry for name, entry in found.items()}


def test_a_folder_becomes_a_step_and_a_folder_again(
    cluster: rapidraid.LocalCluster, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = folder_of(state(), tmp_path / "original")
    monkeypatch.setenv("RAPIDRAID_CONFIG", str(cluster.config))

    def convert(*arguments: str) -> tuple[int, str, str]:
        code = run(arguments)
        return code, *capsys.readouterr()

    # The program of the wheel passes these two commands on.
    command = [sys.executable, "-m", "rapidraid", "import", "--dcp", str(original), f"{job}/7"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"{original} is committed as {job}/7\n", done.stderr
    loaded = flat(state())
    into = state()
    into["model"]["a.weight"].zero_()
    dcp.load(into, checkpoint_id=f"{job}/7", storage_reader=adapter.Reader(config=cluster.config))
    assert flat(into) == loaded
    again = tmp_path / "again"
    code, out, err = convert("export", "--dcp", f"{job}/7", str(again), "--json")
    assert code == 0 and json.loads(out)["step"] == 7, err
    assert flat(load_dcp_folder(again)) == loaded
    for arguments, why in [
        (("export", "--dcp", f"{job}/7", str(again)), "not empty"),
        (("export", "--dcp", f"{job}/9", str(tmp_path / "new")), "is not committed"),
        (("import", "--dcp", str(tmp_path / "nothing"), f"{job}/8"), "has no .metadata"),
        (("import", "--dcp", str(original), f"{job}/7"), "has step 7 already"),
        (("import", "--dcp", str(original), job), "has no step"),
    ]:
        code, _, err = convert(*arguments)
        assert code == 1 and why in err and "Traceback" not in err, err


def test_an_export_names_the_private_state_that_it_leaves_out(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    """DCP has one value for each name, so the other ranks' state has no place in its folder."""
    code, lines = launch(str(Path(__file__).parent / "programs" / "private_state.py"), 3, str(cluster.config), job)
    assert code == 0, lines
    command = [sys.executable, "-m", "rapidraid", "export", "--dcp", "--config", str(cluster.config)]
    done = subprocess.run([*command, f"{job}/1", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{job}/1 leaves out private state of the ranks 1, 2: rng, more/0, more/1, more/2, more/3 and 3 more" in done.stderr
    assert flat(load_dcp_folder(tmp_path / "out")) == {"rng": 0, "shared": 7}


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_hostile_folder_runs_no_code_and_reads_no_other_file(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    folder = folder_of(state(), tmp_path / "folder")
    metadata = folder / ".metadata"
    good = metadata.read_bytes()

    def refuses(content: bytes, why: str) -> None:
        metadata.write_bytes(content)
        with pytest.raises(errors.CorruptError, match=why):
            load_dcp_folder(folder)
        assert not mark.exists()

    refuses(pickle.dumps(Evil(mark)), "no part of DCP's metadata")
    refuses(good[:-20], "damaged")
    refuses(b"", "damaged")
    refuses(pickle.dumps([1]), "holds no metadata")
    # A few bytes that reserve gigabytes, and a state that would patch a class.
    refuses(b"\x80\x04N" + pickle.LONG_BINPUT + (1 << 31).to_bytes(4, "little") + b".", "holds no metadata")
    refuses(b"\x80\x05" + pickle.BYTEARRAY8 + (1 << 36).to_bytes(8, "little") + b".", "damaged")
    module = b"torch.distributed.checkpoint.metadata"
    refuses(b"c" + module + b"\nMetadata\n(N}(V__init__\nNutb.", "sets fields of a type")
    (tmp_path / "secret").write_bytes(next(folder.glob("*.distcp")).read_bytes())
    (folder / "link").symlink_to(tmp_path / "secret")
    for field, value, why in [
        ("relative_path", "../secret", "outside the folder"),
        ("relative_path", "/etc/passwd", "outside the folder"),
        ("relative_path", "link", "outside the folder"),
        ("relative_path", "missing", "is missing"),
        ("relative_path", Path("__0_0.distcp"), "outside the folder|is missing|without a place"),
        ("length", 1 << 40, "beyond the end"),
        ("offset", -1, "before the start"),
    ]:
        broken = pickle.loads(good)
        setattr(next(iter(broken.storage_data.values())), field, value)
        metadata.write_bytes(pickle.dumps(broken))
        if isinstance(value, Path):
            # The path becomes its text, and is the file that it names.
            load_dcp_folder(folder)
        else:
            refuses(pickle.dumps(broken), why)
    weight = "model.a.weight"
    for change, why in [
        (lambda about: setattr(about, "size", torch.Size([1 << 40])), "of other dimensions|the files have"),
        (lambda about: setattr(about, "chunks", []), "no part is stored"),
        (lambda about: setattr(about.chunks[0], "sizes", torch.Size([1, 30])), "are not their tensors"),
        (lambda about: setattr(about.chunks[0], "sizes", torch.Size([-1, 30])), "without a place"),
        (lambda about: setattr(about.chunks[0], "offsets", torch.Size([1, 0])), "not stored"),
        (lambda about: setattr(about.properties, "dtype", "float32"), "no tensor and no object|damaged"),
    ]:
        broken = pickle.loads(good)
        change(broken.state_dict_metadata[weight])
        refuses(pickle.dumps(broken), why)
    for path, why in [
        (("list", 1 << 40), "many more positions"),
        (("list", -1), "before the start"),
        (("a",) * 100, "100 keys"),
        (("list", *[100_000] * 60), "many more positions"),
    ]:
        broken = pickle.loads(good)
        broken.planner_data["list.0"] = path
        refuses(pickle.dumps(broken), why)
    metadata.write_bytes(good)
    assert flat(load_dcp_folder(folder)) == flat(state())


def test_objects_need_allow_pickle(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    folder = folder_of({"a": torch.ones(2), "evil": Evil(mark)}, tmp_path / "folder")
    with pytest.raises(dcp.api.CheckpointException, match="--allow-pickle"):
        import_dcp(folder, f"{job}/1", config=cluster.config)
    assert not mark.exists()
    with pytest.raises(errors.NotFoundError, match="is not committed"):
        export_dcp(f"{job}/1", tmp_path / "out", config=cluster.config)
    assert not (tmp_path / "out").exists()
