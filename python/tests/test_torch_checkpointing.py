"""The storage of ``torch_checkpointing``, by its real ``CheckpointManager``."""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
from ranks import once

import rapidraid

torch = pytest.importorskip("torch")
library = pytest.importorskip("torch_checkpointing")
pytest.importorskip("fsspec")
adapter = importlib.import_module("rapidraid.torch_checkpointing")

PROGRAM = str(Path(__file__).parent / "programs" / "torch_checkpointing_ranks.py")


@pytest.fixture
def config(cluster: rapidraid.LocalCluster) -> Any:
    return adapter.RapidraidStorageConfig(config=str(cluster.config))


def managed(config: Any, **more: Any) -> Any:
    save = library.SyncCheckpointSaverConfig(**more)
    return library.CheckpointManager.Config(save=save, storage_config=config).build()


def test_a_manager_saves_and_loads_by_one_argument(config: Any, job: str) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(300, 700)
    saved = {"model": model.state_dict(), "step": 100, "list": [1, "two"]}
    manager = managed(config)
    manager.save(f"rapidraid://{job}/100", saved)
    manager.save(f"{job}/step-200", {**saved, "step": 200})
    other = torch.nn.Linear(300, 700)
    for use_mmap in (True, False):
        loading = library.CheckpointLoaderConfig(use_mmap=use_mmap)
        reading = library.CheckpointManager.Config(save=library.SyncCheckpointSaverConfig(), load=loading, storage_config=config).build()
        loaded = reading.load(f"{job}/100", into={"model": other.state_dict(), "step": 0, "list": None})
        assert loaded["step"] == 100 and loaded["list"] == [1, "two"]
        assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)
        with torch.no_grad():
            other.weight.zero_()
    storage = config.create_storage()
    assert storage.ls(Path(job)) == ["step-100", "step-200"] and storage.newest(job) == 200
    with pytest.raises(FileNotFoundError):
        manager.load(f"{job}/300", into={"step": 0})
    storage.rmdir(Path(job) / "100")
    assert storage.ls(Path(job)) == ["step-200"]


def test_a_saved_step_is_not_overwritten(config: Any, job: str) -> None:
    manager = managed(config)
    manager.save(f"{job}/1", {"step": 1})
    with pytest.raises(OSError, match="saved already") as raised:
        manager.save(f"{job}/1", {"step": -1})
    assert isinstance(raised.value, rapidraid.errors.ExistsError)
    assert manager.load(f"{job}/1", into={"step": 0})["step"] == 1


def test_what_no_rename_would_save_is_refused(config: Any, job: str) -> None:
    writing = {"write_to_temp_dir": False}, {"temp_dir_prefix": "part_"}
    for settings in writing:
        manager = managed(config, writer_config=library.CheckpointWriterConfig(**settings))
        with pytest.raises(rapidraid.errors.InvalidError, match="without a temporary folder"):
            manager.save(f"{job}/1", {"step": 1})
    with pytest.raises(rapidraid.errors.InvalidError, match="without a temporary folder"):
        managed(config).save(f"{job}/run1/1", {"step": 1})
    assert config.create_storage().newest(job) is None


def test_the_storage_keeps_the_contract_of_its_base_class(config: Any, job: str) -> None:
    storage = pickle.loads(pickle.dumps(config)).create_storage()
    base, made = Path(f"rapidraid://{job}"), Path(f"rapidraid://{job}/tmp_7")
    storage.mkdir(made / "below")
    content = bytes(range(256)) * 20_000
    with storage.stream_write(made / "below" / "one") as stream:
        stream.write(content)
    storage.write(made / "two", memoryview(b"two"))
    storage.write(made / "three", b"three")
    storage.rename(made / "three", made / "two")
    assert storage.read(made / "two") == b"three" and not storage.exists(made / "three")
    with pytest.raises(OSError):
        storage.rename(made / "two", made / "below")
    storage.write(made / "four", b"")
    storage.delete(made / "four")
    assert sorted(storage.ls(made)) == ["below", "two"] and storage.isdir(made / "below") and not storage.isdir(made / "two")
    assert not storage.exists(base / "7")
    storage.rename(made, base / "7", is_directory=True)
    assert not storage.exists(made) and storage.glob(f"{job}/7/t*") == [f"{job}/7/two"]
    path = base / "7" / "below" / "one"
    assert storage.getsize(path) == len(content) and storage.read(path) == content
    args = library.storage.base_storage.ReadArgs(pre_read_full_file=False, known_size_bytes=len(content))
    with storage.stream_read(path, args) as stream:
        assert stream.seek(1000) == 1000
        into = bytearray(5_000_000)
        assert stream.readinto(into) == 5_000_000 and bytes(into) == content[1000:5_001_000]
        stream.seek(-10, io.SEEK_END)
        assert stream.read() == content[-10:]
    args.known_size_bytes = len(content) + 1
    with pytest.raises(OSError, match="were expected"):
        storage.stream_read(path, args)
    with pytest.raises(FileNotFoundError):
        storage.read(base / "7" / "none")
    with pytest.raises(FileNotFoundError):
        storage.getsize(base / "8" / "none")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.2.0")
    with pytest.raises(rapidraid.errors.InvalidError, match=r"torch_checkpointing 0\.2\.0 is installed.*tested with 0\.1\.1"):
        adapter.check_version("torch_checkpointing", adapter.TESTED)


def test_sharded_states_load_on_other_numbers_of_ranks(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Each launch loads what the one before has saved, although one was killed in between."""
    env = {"RAPIDRAID_CONFIG": str(cluster.config)}
    code, lines = once(PROGRAM, 2, job, "1", "async", env=env)
    assert code == 0, "\n".join(lines)
    saved = next(line for line in lines if line.startswith("saved "))
    code, lines = once(PROGRAM, 1, job, "2", "killed", env=env)
    assert code == -signal.SIGKILL, "\n".join(lines)
    code, lines = once(PROGRAM, 1, job, "2", "sync", env=env)
    assert code == 0, "\n".join(lines)
    loaded = next(line for line in lines if line.startswith("loaded "))
    assert loaded.split()[1:] == saved.split()[1:3]
    assert any(line.startswith("saved 2 ") and line.endswith("['step-1', 'step-2']") for line in lines)


def test_a_launcher_that_does_not_count_the_ranks_of_a_host_is_refused(config: Any, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    by_variable = config.create_storage()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    grouped = adapter.RapidraidStorageConfig(config=config.config)
    monkeypatch.undo()
    # The process that writes gets a copy of the configuration, and has no group.
    by_group = pickle.loads(pickle.dumps(grouped)).create_storage()
    place = Path(f"{job}/.tmp-1/0")
    for storage in (by_variable, by_group):
        for local in ("", "1"):
            monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
            for write in (storage.mkdir, storage.stream_write):
                with pytest.raises(rapidraid.errors.InvalidError, match="LOCAL_WORLD_SIZE does not say"):
                    write(place)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        storage.mkdir(place)
