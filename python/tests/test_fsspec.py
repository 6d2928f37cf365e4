"""The file system of fsspec: what it shows and when, its tests from fsspec itself, and DCP by URLs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import once

import rapidraid
from rapidraid import errors
from rapidraid._jobs import forget_checkpointers
from rapidraid._tree import read_files

fsspec = pytest.importorskip("fsspec")
torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
abstract = pytest.importorskip("fsspec.tests.abstract")

PROGRAMS = Path(__file__).parent / "programs"
MIB = 1 << 20
_jobs = itertools.count()

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


@pytest.fixture(scope="module", autouse=True)
def configured(cluster: rapidraid.LocalCluster) -> Iterator[None]:
    """Names the configuration as a user does, so that URLs need no options."""
    before = os.environ.get("RAPIDRAID_CONFIG")
    os.environ["RAPIDRAID_CONFIG"] = str(cluster.config)
    yield
    os.environ.pop("RAPIDRAID_CONFIG")
    if before is not None:
        os.environ["RAPIDRAID_CONFIG"] = before


@pytest.fixture
def fs() -> Any:
    return fsspec.filesystem("rapidraid")


def new_job() -> str:
    return f"files-{next(_jobs)}"


def spooled(cluster: rapidraid.LocalCluster, job: str) -> list[str]:
    """Returns the names of the folders that a job has in the spool."""
    folder = cluster.staging / "spool" / job
    return sorted(os.listdir(folder)) if folder.exists() else []


def committed(cluster: rapidraid.LocalCluster, job: str) -> list[int]:
    """Returns the steps that are committed, as any other process sees them."""
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        return [info.step for info in checkpointer.steps() if info.is_committed]


def forget_memory(cluster: rapidraid.LocalCluster) -> None:
    """Destroys the host's memory. This process connects anew, like one on another host."""
    cluster.forget_memory()
    forget_checkpointers()


class TestSpool(
    abstract.AbstractOpenTests,
    abstract.AbstractPipeTests,
    abstract.AbstractPutTests,
    abstract.AbstractGetTests,
    abstract.AbstractCopyTests,
    abstract.AbstractFixtures,
):
    """fsspec's own tests on files of a step that is not saved yet."""

    @pytest.fixture
    def fs(self) -> Any:
        return fsspec.filesystem("rapidraid")

    @pytest.fixture
    def fs_path(self) -> str:
        return f"{new_job()}/1"


class TestSaved(abstract.AbstractGetTests, abstract.AbstractFixtures):
    """fsspec's own tests that only read, on committed steps."""

    @pytest.fixture(scope="class")
    @classmethod
    def fs(cls) -> Any:
        return fsspec.filesystem("rapidraid")

    @pytest.fixture(scope="class")
    @classmethod
    def fs_path(cls) -> str:
        return f"{new_job()}/1"

    @classmethod
    def saved(cls, fs: Any, scenario: str) -> Iterator[str]:
        step = f"{new_job()}/1"
        source = getattr(cls(), scenario)(fs, os.path.join, step)
        fs.commit(step)
        yield source
        fs.rm(step, recursive=True)
        assert not fs.exists(step)

    @pytest.fixture(scope="class")
    @classmethod
    def fs_bulk_operations_scenario_0(cls, fs: Any) -> Iterator[str]:
        yield from cls.saved(fs, "_bulk_operations_scenario_0")

    @pytest.fixture(scope="class")
    @classmethod
    def fs_glob_edge_cases_files(cls, fs: Any) -> Iterator[str]:
        yield from cls.saved(fs, "_glob_edge_cases_files")

    @pytest.fixture(scope="class")
    @classmethod
    def fs_dir_and_file_with_same_name_prefix(cls, fs: Any) -> Iterator[str]:
        yield from cls.saved(fs, "_dir_and_file_with_same_name_prefix")

    @pytest.fixture(scope="class")
    @classmethod
    def fs_10_files_with_hashed_names(cls, fs: Any) -> Iterator[str]:
        yield from cls.saved(fs, "_10_files_with_hashed_names")


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"model": {f"layer-{at}": torch.randn(64, 64) for at in range(8)}, "empty": torch.empty(0), "step": seed}


def assert_loads(folder: str, seed: int) -> None:
    into = {**state(100), "step": -1}
    dcp.load(into, checkpoint_id=folder)
    saved = state(seed)
    assert into["step"] == seed and all(torch.equal(into["model"][name], saved["model"][name]) for name in saved["model"])


def test_dcp_saves_and_loads_by_url(cluster: rapidraid.LocalCluster, fs: Any) -> None:
    job = new_job()
    for step in (1, 20):
        dcp.save(state(step), checkpoint_id=f"rapidraid://{job}/step-{step}")
    assert committed(cluster, job) == [1, 20] and spooled(cluster, job) == []
    assert fs.ls(f"rapidraid://{job}", detail=False) == [f"{job}/step-1", f"{job}/step-20"]
    forget_memory(cluster)
    assert_loads(f"rapidraid://{job}/1", 1)
    assert_loads(f"rapidraid://{job}/step-20", 20)
    # Neither a committed step nor an earlier one is written.
    with pytest.raises(BaseException, match=f"{job}/20 is saved already"):
        dcp.save(state(3), checkpoint_id=f"rapidraid://{job}/20")
    with pytest.raises(BaseException, match="would ignore step 3"):
        dcp.save(state(3), checkpoint_id=f"rapidraid://{job}/3")
    assert_loads(f"rapidraid://{job}/20", 20)
    fs.rm(f"rapidraid://{job}/step-20", recursive=True)
    assert committed(cluster, job) == [1]


def test_two_ranks_save_one_step(cluster: rapidraid.LocalCluster) -> None:
    job = new_job()
    code, lines = once(str(PROGRAMS / "fsspec_dcp.py"), 2, job)
    assert code == 0, "\n".join(lines)
    assert "files .metadata __0_0.distcp __1_0.distcp" in lines
    assert f"steps {job}/step-1 {job}/step-2 {job}/step-3" in lines
    assert committed(cluster, job) == [1, 2, 3] and spooled(cluster, job) == []


def test_nothing_is_visible_before_the_metadata_has_its_name(cluster: rapidraid.LocalCluster, fs: Any) -> None:
    job = new_job()
    folder = f"rapidraid://{job}/5"
    fs.pipe({f"{folder}/a/b": b"content", f"{folder}/{'x' * 200}": b"", f"{folder}/.metadata.tmp": b"last"})
    assert fs.cat_ranges([f"{folder}/a/b"] * 2, 1, [3, 4]) == [b"on", b"ont"]
    assert fs.exists(f"{folder}/a/b") and not fs.exists(f"{folder}/.metadata")
    assert committed(cluster, job) == [] and not fs.exists(f"rapidraid://{job}") and not seen_elsewhere(folder)
    fs.rename(f"{folder}/.metadata.tmp", f"{folder}/.metadata")
    assert seen_elsewhere(folder) == [".metadata", "a/b", "x" * 200]
    assert committed(cluster, job) == [5] and spooled(cluster, job) == []
    assert fs.cat_file(f"{folder}/.metadata") == b"last" and fs.cat_file(f"{folder}/{'x' * 200}") == b""
    for refused in (
        lambda: fs.open(f"{folder}/c", "wb"),
        lambda: fs.rm(f"{folder}/a/b"),
        lambda: fs.mv(f"{folder}/a/b", f"{folder}/c"),
        lambda: fs.rm(folder),
    ):
        with pytest.raises((errors.ExistsError, errors.InvalidError)):
            refused()
    assert seen_elsewhere(folder) == [".metadata", "a/b", "x" * 200]


def seen_elsewhere(folder: str) -> list[str]:
    """Returns the files of a step that another process sees. It imports no torch."""
    code = "import sys, fsspec; print('\\n'.join(fsspec.filesystem('rapidraid').find(sys.argv[1]))); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [name.split("/", 2)[2] for name in done.stdout.split()]


@contextlib.contextmanager
def writing(job: str, step: int) -> Iterator[subprocess.Popen[str]]:
    """Runs a process that has written files of a step and does not complete it. Kills it at the end."""
    command = [sys.executable, str(PROGRAMS / "fsspec_held.py"), job, str(step)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "written\n"
            yield child
        finally:
            child.send_signal(signal.SIGKILL)


def test_a_killed_process_leaves_nothing(cluster: rapidraid.LocalCluster, fs: Any) -> None:
    """While it lives no other launch writes its step. After its death the next one begins with an empty folder."""
    job = new_job()
    with writing(job, 7) as child:
        with pytest.raises(errors.ExistsError, match=f"process {child.pid} of another launch"):
            fs.open(f"rapidraid://{job}/7/x", "wb")
        with pytest.raises(BaseException, match="of another launch"):
            dcp.save(state(7), checkpoint_id=f"rapidraid://{job}/7")
        assert not fs.exists(f"rapidraid://{job}/7/left")
    assert committed(cluster, job) == [] and not fs.exists(f"rapidraid://{job}/7")
    dcp.save(state(7), checkpoint_id=f"rapidraid://{job}/7")
    assert_loads(f"rapidraid://{job}/7", 7)
    assert fs.ls(f"{job}/7", detail=False) == [f"{job}/7/.metadata", f"{job}/7/__0_0.distcp"]
    assert spooled(cluster, job) == []


def test_the_folder_of_a_dead_process_is_removed_by_another_step(cluster: rapidraid.LocalCluster, fs: Any) -> None:
    job = new_job()
    with writing(job, 7):
        fs.pipe(f"{job}/8/a", b"a")
        assert spooled(cluster, job) == ["step-7", "step-8"]
    fs.pipe(f"{job}/9/a", b"a")
    assert spooled(cluster, job) == ["step-8", "step-9"]
    # A process that exits normally removes the files that it has not saved, and warns about them.
    code = f"import fsspec; fsspec.filesystem('rapidraid').pipe('{job}/10/a', b'a')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "step-10 was written, but not saved" in done.stderr
    assert spooled(cluster, job) == ["step-8", "step-9"]
    # Step 8 cannot be saved any more when step 9 is.
    fs.commit(f"{job}/9")
    assert spooled(cluster, job) == [] and committed(cluster, job) == [9]


def test_a_restarted_launch_of_the_same_name_begins_anew(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor may start the next launch at the same address. The ranks of one launch see what each other has written."""
    job = new_job()
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with writing(job, 7):
        pass
    assert not fs.exists(f"{job}/7/left")
    fs.pipe(f"{job}/7/new", b"")
    assert fs.ls(f"{job}/7", detail=False) == [f"{job}/7/new"]
    fs.rm(f"{job}/7", recursive=True)
    with writing(job, 8):
        assert fs.cat_file(f"{job}/8/left") == b"by a process that was killed"
        assert not fs.exists(f"{job}/8/half")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert not fs.exists(f"{job}/8/left")
        monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    fs.rm(f"{job}/8", recursive=True)


def test_a_temporary_folder_becomes_a_step(cluster: rapidraid.LocalCluster, fs: Any) -> None:
    """What the metadata names must be there. A rename that fails changes nothing, and can be tried again."""
    job = new_job()
    dcp.save(state(4), checkpoint_id=f"rapidraid://{job}/step-4.tmp")
    assert committed(cluster, job) == []
    shard = f"{job}/step-4.tmp/__0_0.distcp"
    content = fs.cat_file(shard)
    for damage in (lambda: fs.rm(shard), lambda: fs.pipe(shard, content[:-1000])):
        damage()
        with pytest.raises(errors.InvalidError, match="__0_0.distcp is not on this host, or shorter"):
            fs.mv(f"{job}/step-4.tmp", f"{job}/step-4", recursive=True)
    fs.pipe(shard, content)
    fs.mv(f"{job}/step-4.tmp", f"{job}/step-4", recursive=True)
    assert_loads(f"rapidraid://{job}/4", 4)
    assert spooled(cluster, job) == []


def test_a_commit_that_takes_too_long_goes_on(cluster: rapidraid.LocalCluster) -> None:
    """The step is staged by then, so it is committed without the process. It is not visible before."""
    job = new_job()
    fs = fsspec.filesystem("rapidraid", commit_timeout=0.0)
    content = os.urandom(8 * MIB)
    fs.pipe(f"{job}/1/a", content)
    with pytest.raises(errors.DeadlineError):
        fs.commit(f"{job}/1")
    place = fs._place(f"{job}/1/a")
    until = time.monotonic() + 60
    while True:
        try:
            assert fs._sizes(place) == {"a": len(content)}
            break
        except errors.NoFileError:
            assert time.monotonic() < until
    assert committed(cluster, job) == [1]
    with pytest.raises(errors.ExistsError):
        fs.commit(f"{job}/1")
    fs.pipe(f"{job}/2/a", b"")
    fsspec.filesystem("rapidraid").commit(f"{job}/2")
    assert fs.cat_file(f"{job}/1/a") == content and spooled(cluster, job) == []


def test_a_launch_of_several_hosts_is_refused(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = new_job()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(errors.InvalidError, match=r"rapidraid\.torch\.Writer"):
        fs.open(f"{job}/1/a", "wb")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    fs.pipe(f"{job}/1/a", b"a")


def test_a_transaction_saves_its_files(cluster: rapidraid.LocalCluster, fs: Any) -> None:
    job = new_job()
    with pytest.raises(KeyError), fs.transaction, fs.open(f"{job}/1/a", "wb") as file:
        file.write(b"lost")
        raise KeyError
    assert committed(cluster, job) == [] and fs.ls(f"{job}/1") == []
    with fs.transaction:
        with fs.open(f"{job}/1/a", "wb") as file:
            file.write(b"first")
        assert not fs.exists(f"{job}/1/a")
        fs.pipe(f"{job}/2/b", b"second")
        assert committed(cluster, job) == []
    assert committed(cluster, job) == [1, 2]
    assert fs.cat([f"{job}/1/a", f"{job}/2/b"]) == {f"{job}/1/a": b"first", f"{job}/2/b": b"second"}


def test_only_the_range_that_is_asked_for_is_read(cluster: rapidraid.LocalCluster, fs: Any, caplog: pytest.LogCaptureFixture) -> None:
    job = new_job()
    content = os.urandom(16 * MIB + 12345)
    with fs.transaction:
        fs.pipe({f"{job}/1/long": content, f"{job}/1/short": b"0123456789"})
    forget_memory(cluster)
    caplog.set_level("INFO", logger="rapidraid")

    def most_read() -> int:
        found = [int(match) for match in re.findall(r"are read, (\d+) of", caplog.text)]
        caplog.clear()
        return max(found)

    at = 5 * MIB + 1000
    assert fs.cat_file(f"{job}/1/long", at, at + 100) == content[at : at + 100] and most_read() <= MIB + 128 * 1024
    assert fs.cat_file(f"{job}/1/long", -5) == content[-5:] and most_read() <= MIB
    assert fs.cat_file(f"{job}/1/long", 3, -len(content) + 7) == content[3:7] and most_read() <= MIB + 128 * 1024
    got = fs.cat_ranges([f"{job}/1/long", f"{job}/1/short", f"{job}/1/none"], [MIB - 1, 2, 0], [MIB + 1, 5, 1])
    assert got[:2] == [content[MIB - 1 : MIB + 1], b"234"] and isinstance(got[2], FileNotFoundError)
    caplog.clear()
    got = fs.cat_ranges([f"{job}/1/long", f"{job}/1/short"], [MIB - 1, 2], [MIB + 1, 5])
    assert got == [content[MIB - 1 : MIB + 1], b"234"] and most_read() <= 3 * MIB
    with fs.open(f"{job}/1/long") as file:
        file.seek(-10, os.SEEK_END)
        into = bytearray(20)
        assert file.readinto(into) == 10 and bytes(into[:10]) == content[-10:]
        file.seek(at)
        assert file.read(3) == content[at : at + 3] and most_read() <= 5 * MIB
    status = json.loads(cluster.command("stage", "--status", "--json"))
    assert status["used_bytes"] == 0, "the whole step was read"
    with fs.open(f"{job}/1/long") as file:
        assert file.read(7) == content[:7] and file.read() == content[7:] and file.read() == b""
        file.seek(1)
        into = bytearray(len(content))
        assert file.readinto(into) == len(content) - 1 and into[:-1] == content[1:]
        again = pickle.loads(pickle.dumps(file))
        again.seek(at)
        assert again.read(10) == content[at : at + 10]
    with fs.open(f"{job}/1/short", "r") as text:
        assert text.read() == "0123456789"


def test_a_file_that_is_read_on_is_fetched_with_its_step(cluster: rapidraid.LocalCluster, fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of small pieces does not wait for the cluster at each of them, as ``dcp.load`` would."""
    job = new_job()
    long, short = os.urandom(30 * MIB + 12345), os.urandom(9 * MIB)
    with fs.transaction:
        fs.pipe({f"{job}/1/long": long, f"{job}/1/short": short})
    forget_memory(cluster)

    def read_by_pieces(name: str) -> bytes:
        with fs.open(f"{job}/1/{name}") as file:
            return b"".join(iter(lambda: file.read(MIB // 2), b""))

    def used_bytes() -> int:
        return int(json.loads(cluster.command("stage", "--status", "--json"))["used_bytes"])

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with fs.open(f"{job}/1/long") as file:
        # All of it could be read, but it may be the only part.
        assert file.read(6 * MIB) == long[: 6 * MIB] and used_bytes() == 0
    assert read_by_pieces("short") == short and used_bytes() == 0, "a quarter of the step at most is read by ranges"
    assert read_by_pieces("long") == long and used_bytes() > len(long) + len(short)
    forget_memory(cluster)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert read_by_pieces("short") == short and used_bytes() > len(long) + len(short), "the other rank reads as much"


def test_a_step_without_room_in_memory_is_asked_for_seldom() -> None:
    """Each request frees what other loads have left in the host's memory."""
    from rapidraid._open_files import SavedFile
    from rapidraid.fsspec import RapidraidFileSystem

    asked: list[int] = []

    class Cluster(RapidraidFileSystem):
        def _read(self, wanted: Any, expected: int = 0) -> list[Any]:
            asked.append(expected)
            return [bytes(end - start) for _, start, end, _ in wanted]

    size = 512 * MIB
    file = SavedFile(Cluster(skip_instance_cache=True), "job/1/file", block_size=4 * MIB, size=size, cache_type="none")
    for _ in range(size // (4 * MIB)):
        assert len(file.read(4 * MIB)) == 4 * MIB
    # A 64th is 8 MiB: two reads, and the third asks.
    assert len(asked) == 128 and set(asked) == {0, size} and [at for at, expected in enumerate(asked) if expected] == [*range(2, 128, 3)]


def test_a_file_system_is_its_settings(cluster: rapidraid.LocalCluster) -> None:
    """It is pickled by them, and a forked child reads with a connection of its own."""
    job = new_job()
    fs = fsspec.filesystem("rapidraid", config=str(cluster.config), keep=3, commit_timeout=60.0)
    fs.pipe(f"{job}/1/a", b"a")
    again = pickle.loads(pickle.dumps(fs))
    assert (again.config, again.keep, again.commit_timeout) == (str(cluster.config), 3, 60.0)
    again.commit(f"{job}/1")
    fs.pipe(f"{job}/2/b", b"b")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            is_right = fs.cat_file(f"{job}/1/a") == b"a" and not fs.exists(f"{job}/2/b")
            try:
                fs.open(f"{job}/2/c", "wb")
            except errors.ExistsError:
                code = 0 if is_right else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    fsspec.filesystem("rapidraid", keep=1).commit(f"{job}/2")
    assert fs.cat_file(f"{job}/2/b") == b"b"
    until = time.monotonic() + 30
    # Older steps are removed after the commit, in the background.
    while committed(cluster, job) != [2]:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_daemon_that_has_ended_is_started_again(cluster: rapidraid.LocalCluster, fs: Any) -> None:
    """The spool outlives it."""
    job = new_job()
    fs.pipe(f"{job}/1/a", b"a")
    cluster.kill("staging")
    assert fs.cat_file(f"{job}/1/a") == b"a" and not fs.exists(f"{job}/1/b")
    fs.commit(f"{job}/1")
    with fs.open(f"{job}/1/a") as file:
        os.kill(cluster.daemon_pid(), signal.SIGKILL)
        assert file.read() == b"a"
    # The next tests need a daemon that ends with the cluster.
    cluster._kill_started_by_rank(0)
    cluster.start_staging()


def test_what_another_door_has_saved_has_no_files(cluster: rapidraid.LocalCluster, fs: Any) -> None:
    job = new_job()
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        checkpointer.save(3, {"model": torch.ones(3)})
    assert fs.ls(f"{job}/3") == [] and fs.isdir(f"{job}/3")
    with pytest.raises(errors.NoFileError, match=r"rapidraid\.torch\.Reader"):
        fs.open(f"{job}/3/.metadata")
    # A step that files were saved as is one for a Checkpointer, too.
    fs.pipe(f"{job}/4/a", b"\x01\x02")
    fs.commit(f"{job}/4")
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        assert checkpointer.latest() == 4 and checkpointer.read(4, "files/a").tolist() == [1, 2]
        # Integrations that keep small files as plain values have none in such a step.
        assert read_files(checkpointer, 4) == (4, {}, {"files"})


@pytest.mark.parametrize(
    "url", ["rapidraid://gpt/file", "rapidraid://gpt", "rapidraid://gpt/1", "rapidraid://gpt/1/../2", "rapidraid://../1/a"]
)
def test_a_url_without_a_file_of_a_step_is_refused(fs: Any, url: str) -> None:
    with pytest.raises(errors.InvalidError, match="rapidraid://JOB/STEP/FILE"):
        fs.open(url, "wb")


def test_there_is_no_list_of_jobs(fs: Any) -> None:
    with pytest.raises(errors.InvalidError, match="rapidraid ls"):
        fs.ls("rapidraid://")
    assert not fs.exists("rapidraid://gpt/file") and not fs.exists("rapidraid://no-such-job/1")
    with pytest.raises(FileNotFoundError):
        fs.ls("rapidraid://no-such-job")


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_metadata_that_was_copied_from_anywhere_runs_no_code(fs: Any, tmp_path: Path) -> None:
    """The file is looked into before its step is saved."""
    job, mark = new_job(), tmp_path / "mark"
    fs.pipe(f"{job}/1/.metadata.tmp", pickle.dumps(Evil(mark)))
    fs.mv(f"{job}/1/.metadata.tmp", f"{job}/1/.metadata")
    assert not mark.exists() and fs.cat(f"{job}/1/.metadata") == pickle.dumps(Evil(mark))
