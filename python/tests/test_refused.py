"""Invalid calls are refused with a message that names the cause and a hint, and committed steps stay untouched."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import rapidraid
from rapidraid import checkpointer as checkpointers
from rapidraid import errors
from rapidraid._program import find_config, program

torch = pytest.importorskip("torch")


def saved(cluster: rapidraid.LocalCluster, job: str, state: dict[str, Any], step: int = 1) -> rapidraid.Checkpointer:
    """Returns a checkpointer that has committed a step."""
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    checkpointer.save(step, state)
    checkpointer.wait()
    return checkpointer


def test_loads_that_do_not_fit(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Names that are missing, extra, or of another shape or type are named in the error, and nothing is changed."""
    saved(cluster, job, {"a": torch.ones(2, 3), "b": torch.ones(4), "n": 5})

    def load(state: dict[str, Any], **choices: Any) -> int | None:
        return rapidraid.Checkpointer(job, config=cluster.config).load(state, **choices)

    zero = {"a": torch.zeros(2, 3), "b": torch.zeros(4), "n": 0}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({**zero, "c": torch.zeros(1)}, errors.NotFoundError, "does not have c"),
        ({"a": zero["a"], "n": 0}, errors.InvalidError, "has b, for which the state has no place"),
        ({**zero, "a": torch.zeros(3, 2)}, errors.InvalidError, r"a has the shape \[2, 3\] in step 1, and \[3, 2\] in the state"),
        ({**zero, "b": torch.zeros(4, dtype=torch.float64)}, errors.InvalidError, "b is float32 in step 1, and float64 in the state"),
        ({**zero, "n": torch.zeros(1)}, errors.InvalidError, "n is a plain value in step 1, and a tensor"),
        ({**zero, "a": 1}, errors.InvalidError, "a is a tensor in step 1"),
    ]
    for state, kind, message in cases:
        with pytest.raises(kind, match=message) as raised:
            load(state)
        assert isinstance(raised.value, rapidraid.RapidraidError) and raised.value.hint
        assert not zero["a"].any() and not zero["b"].any() and zero["n"] == 0
    assert load({"a": zero["a"], "new": torch.zeros(1)}, strict=False) == 1 and zero["a"].all()
    wide = {"b": torch.zeros(4, dtype=torch.float64)}
    assert load(wide, strict=False, cast=True) == 1 and wide["b"].all()
    only = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    assert load(only, include=lambda name: name == "b") == 1 and only["b"].all() and not only["a"].any()


def test_steps_that_are_not_there(cluster: rapidraid.LocalCluster, job: str) -> None:
    """A load returns nothing if the job has no step, and fails if the given step does not exist."""
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    assert checkpointer.load({"a": torch.zeros(1)}) is None
    assert checkpointer.latest() is None and checkpointer.steps() == [] and checkpointer.wait() == []
    with pytest.raises(errors.NotFoundError, match=f"{job}/7 is not committed"):
        checkpointer.load({"a": torch.zeros(1)}, step=7)
    with pytest.raises(errors.NotFoundError, match="has no nothing"):
        saved(cluster, job, {"a": torch.ones(1)}).read(1, "nothing")
    with pytest.raises(errors.InvalidError, match="job name"):
        rapidraid.Checkpointer("a/b", config=cluster.config).load({})


def test_a_step_is_saved_once(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Neither the launch that saved a step nor one that loaded it can save the step again."""
    checkpointer = saved(cluster, job, {"a": torch.ones(2)})
    with pytest.raises(errors.ExistsError, match="step 1 of .* is saved already"):
        checkpointer.save(1, {"a": torch.ones(2)})
    checkpointer.save(2, {"a": torch.ones(2)})
    checkpointer.wait()
    other = rapidraid.Checkpointer(job, config=cluster.config)
    other.load({"a": torch.zeros(2)})
    with pytest.raises(errors.ExistsError, match="step 1 of"):
        other.save(1, {"a": torch.ones(2)})


def test_later_steps_are_not_overwritten_unasked(cluster: rapidraid.LocalCluster, job: str) -> None:
    """A launch that resumes from an earlier step must pass abandon_later, and then the later steps are removed."""
    first = saved(cluster, job, {"a": torch.full((2,), 1.0)}, 10)
    first.save(20, {"a": torch.full((2,), 2.0)})
    first.save(30, {"a": torch.full((2,), 3.0)})
    first.wait()
    state = {"a": torch.zeros(2)}
    careless = rapidraid.Checkpointer(job, config=cluster.config)
    assert careless.load(state, step=10) == 10
    with pytest.raises(errors.ExistsError, match="resumed from step 10, but later steps are there: 2 from 20 to 30"):
        careless.save(15, state)
    fresh = rapidraid.Checkpointer(job, config=cluster.config)
    with pytest.raises(errors.ExistsError, match="resumed from nothing, but later steps are there: 3 from 10 to 30"):
        fresh.save(5, state)
    sure = rapidraid.Checkpointer(job, config=cluster.config, abandon_later=True)
    assert sure.load(state, step=10) == 10
    sure.save(15, state)
    sure.wait()
    assert [info.step for info in sure.steps()] == [10, 15]


def test_an_older_launch_is_fenced(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Loading and listing do not affect other launches; saving fences the older launch for good."""
    old = saved(cluster, job, {"a": torch.ones(2)})
    new = rapidraid.Checkpointer(job, config=cluster.config)
    new.load({"a": torch.zeros(2)})
    assert new.latest() == 1
    old.save(2, {"a": torch.ones(2)})
    old.wait()
    new.load({"a": torch.zeros(2)})
    new.save(3, {"a": torch.ones(2)})
    with pytest.raises(errors.FencedError, match=r"is over: a newer launch \([0-9a-f]+\) has been writing for the job since 20") as raised:
        old.save(4, {"a": torch.ones(2)})
    assert "end this process" in raised.value.hint
    new.wait()
    assert [info.step for info in new.steps()] == [1, 2, 3]


def test_no_daemon(tmp_path: Path, cluster: rapidraid.LocalCluster) -> None:
    """The call fails with a hint on what to do."""
    config = cluster.config.with_name("nobody.toml")
    config.write_text(cluster.config.read_text().replace(str(cluster.staging), f"{cluster.staging}-nobody"))
    with pytest.raises(errors.NoDaemonError) as raised:
        rapidraid.Checkpointer("job", config=config, start=False, timeout=2)
    assert "rapidraid stage" in raised.value.hint
    with pytest.raises(errors.NotFoundError, match="no-such-file"):
        rapidraid.Checkpointer("job", config=tmp_path / "no-such-file.toml")


def test_another_users_folder(cluster: rapidraid.LocalCluster, tmp_path: Path) -> None:
    """A folder that belongs to another user, or that other users can access, is not trusted."""
    config = cluster.config.with_name("open.toml")
    config.write_text(cluster.config.read_text().replace(str(cluster.staging), str(tmp_path)))
    os.chmod(tmp_path, 0o755)
    with pytest.raises(errors.DeniedError, match="can be entered by others"):
        rapidraid.Checkpointer("job", config=config)
    if os.geteuid() == 0:
        os.chmod(tmp_path, 0o700)
        os.chown(tmp_path, 12345, -1)
        with pytest.raises(errors.DeniedError, match="belongs to user 12345"):
            rapidraid.Checkpointer("job", config=config)
        os.chown(tmp_path, 0, -1)


def test_memory_that_does_not_suffice(cluster: rapidraid.LocalCluster, job: str) -> None:
    """`prepare` fails with a message that says what uses the memory, and changes nothing."""
    other = saved(cluster, f"{job}-other", {"a": torch.ones(1_000_000)})
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config, timeout=5)
    with pytest.raises(errors.BusyError, match="staging memory is full") as raised:
        checkpointer.prepare({"huge": torch.empty(5 << 30, dtype=torch.uint8)})
    assert f"{job}-other has" in str(raised.value) and "staging.memory" in raised.value.hint
    other.save(2, {"a": torch.ones(1_000_000)})
    other.wait()


@pytest.mark.parametrize("when_full", ["skip", "error"])
def test_full_segments(cluster: rapidraid.LocalCluster, job: str, when_full: Any) -> None:
    """While both segments are in use, `when_full` decides."""
    for node in cluster.nodes[3:]:
        cluster.pause(node)
    try:
        checkpointer = rapidraid.Checkpointer(job, config=cluster.config, when_full=when_full)
        state = {"a": torch.ones(1000)}
        assert checkpointer.save(1, state) and checkpointer.save(2, state)
        if when_full == "skip":
            assert checkpointer.save(3, state) is False
        else:
            with pytest.raises(errors.BusyError, match="is being"):
                checkpointer.save(3, state)
    finally:
        for node in cluster.nodes[3:]:
            cluster.resume(node)
    for step in (1, 2):
        checkpointer.wait(step)
    assert [info.step for info in checkpointer.steps()] == [1, 2]


def test_a_failed_save_is_raised_once_by_the_next_call(cluster: rapidraid.LocalCluster, job: str, caplog: pytest.LogCaptureFixture) -> None:
    """A step that another client has committed meanwhile cannot be saved. The next call raises the error."""
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config)
    checkpointer.save(1, {"a": torch.ones(4)})
    checkpointer.wait()
    (cluster.folder / "foreign.bin").write_bytes(b"foreign")
    cluster.command("save", f"{job}/2", str(cluster.folder / "foreign.bin"))
    checkpointer.save(2, {"a": torch.ones(4)})
    with pytest.raises(errors.ExistsError, match="saving step 2"):
        checkpointer.wait(2)
    with pytest.raises(errors.ExistsError, match="saving step 2"):
        checkpointer.save(3, {"a": torch.ones(4)})
    assert len([record for record in caplog.records if "step 2 was not saved" in record.message]) == 1
    checkpointer.save(3, {"a": torch.ones(4)})
    checkpointer.wait()


def test_a_checkpoint_that_no_trainer_saved(cluster: rapidraid.LocalCluster, job: str) -> None:
    """A checkpoint of plain files can only be restored by the command line."""
    (cluster.folder / "plain.bin").write_bytes(b"plain")
    cluster.command("save", f"{job}/1", str(cluster.folder / "plain.bin"))
    with pytest.raises(errors.InvalidError, match="was not saved by a trainer") as raised:
        rapidraid.Checkpointer(job, config=cluster.config).load({"a": torch.zeros(1)})
    assert "rapidraid restore" in raised.value.hint


def test_interrupts_end_a_wait(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Ctrl-C during a call raises KeyboardInterrupt immediately, and the checkpointer stays usable."""
    checkpointer = saved(cluster, job, {"a": torch.ones(4)})
    for node in cluster.nodes[3:]:
        cluster.pause(node)
    # A shell that starts the tests in the background ignores interrupts for them.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        checkpointer.save(2, {"a": torch.ones(4)})
        timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            checkpointer.wait(timeout=60)
        assert time.monotonic() - begun < 20
    finally:
        signal.signal(signal.SIGINT, before)
        for node in cluster.nodes[3:]:
            cluster.resume(node)
    checkpointer.wait(2)


def test_a_forked_child_holds_nothing(cluster: rapidraid.LocalCluster, job: str) -> None:
    """A forked child cannot use its parent's checkpointer, and the child's end does not count as the parent's."""
    checkpointer = saved(cluster, job, {"a": torch.ones(4)})
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            segments = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/segments/" in line]
            held = [fd for fd in os.listdir("/proc/self/fd") if "segments" in os.path.realpath(f"/proc/self/fd/{fd}")]
            try:
                checkpointer.save(2, {"a": torch.ones(4)})
                said = "saved"
            except errors.ForkedError as error:
                said = str(error)
            os.write(writer, f"{len(segments)} {len(held)} {said}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 4096).decode().startswith("0 0 this process cannot use the session")
    checkpointer.save(2, {"a": torch.ones(4)})
    checkpointer.wait()


def test_a_forked_child_unmaps_nothing_of_its_own(cluster: rapidraid.LocalCluster, job: str) -> None:
    """It has no mapping of the segments. What it maps at their addresses stays when it drops their buffers."""
    code = (
        "import ctypes, mmap, os, re, sys, torch, rapidraid\n"
        "c = rapidraid.Checkpointer(sys.argv[1], config=sys.argv[2])\n"
        "c.prepare({'a': torch.ones(4)})\n"
        "kept = c._saver.plan\n"
        "address = int(re.search('([0-9a-f]+)-.*/segments/', open('/proc/self/maps').read())[1], 16)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    map_at = ctypes.CDLL(None).mmap\n"
        "    map_at.restype = ctypes.c_void_p\n"
        "    map_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]\n"
        "    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000\n"  # MAP_FIXED_NOREPLACE
        "    assert map_at(address, 4096, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address\n"
        "    ctypes.memset(address, 7, 4096)\n"
        "    kept.release_segments()\n"
        "    del kept, c\n"
        "    os._exit(0 if ctypes.string_at(address, 1) == b'\\7' else 1)\n"
        "print('ended with', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "c.leave()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, job, str(cluster.config)], capture_output=True, text=True, timeout=60)
    assert "ended with 0" in done.stdout, (done.stdout, done.stderr)


def test_a_rank_with_memory_for_one_segment_makes_do_with_it(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    """The staging folder has room for one segment and not for two. Each save waits for the one before, and none fails."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount")
    # The paths of the certificates are relative to the configuration.
    folder, config = tmp_path / "memory", cluster.config.with_name("one-segment.toml")
    folder.mkdir()
    config.write_text(cluster.config.read_text().replace(json.dumps(str(cluster.staging)), json.dumps(str(folder / "staging"))))
    code = (
        "import sys, torch, rapidraid\n"
        "with rapidraid.Checkpointer(sys.argv[1], config=sys.argv[2], start=False) as c:\n"
        "    for step in range(1, 5):\n"
        "        c.save(step, {'a': torch.full((4 << 20,), float(step))})\n"
        "    c.wait()\n"
        "    print('saved', [info.step for info in c.steps()])\n"
    )
    script = (
        f"set -e; mount -t tmpfs -o size=28m none '{folder}'\n"
        f"'{program()}' stage --config '{config}' & daemon=$!\n"
        f"until [ -S '{folder}/staging/socket' ]; do kill -0 $daemon; sleep 0.05; done\n"
        f"'{sys.executable}' -c \"$CODE\" '{job}' '{config}' || result=$?\n"
        "kill -KILL $daemon; wait $daemon || true; exit ${result:-0}\n"
    )
    done = subprocess.run(
        ["unshare", "--mount", "--kill-child=KILL", "--fork", "sh", "-c", script],
        env={**os.environ, "CODE": code}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and "saved [1, 2, 3, 4]" in done.stdout, done.stderr
    assert "a rank has no memory for another segment" in done.stderr


def test_a_signal_asks_the_loop_to_end(cluster: rapidraid.LocalCluster, job: str) -> None:
    """`save_on` sets a flag that the loop polls."""
    code = (
        "import os, signal, sys, torch, rapidraid\n"
        "c = rapidraid.Checkpointer(sys.argv[1], config=sys.argv[2], save_on=signal.SIGTERM)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert c.should_stop\n"
        "c.save(1, {'a': torch.ones(2)}); c.wait(); print('saved')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, job, str(cluster.config)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "saved" in done.stdout, done.stderr


def test_keep_removes_older_steps(cluster: rapidraid.LocalCluster, job: str) -> None:
    """After each commit only the newest steps remain."""
    checkpointer = rapidraid.Checkpointer(job, config=cluster.config, keep=2)
    for step in range(1, 6):
        checkpointer.save(step, {"a": torch.ones(4)})
        checkpointer.wait()
    until = time.monotonic() + 20
    while [info.step for info in checkpointer.steps()] != [4, 5] and time.monotonic() < until:
        time.sleep(0.05)
    assert [info.step for info in checkpointer.steps()] == [4, 5]
    checkpointer.remove(4)
    assert checkpointer.latest() == 5


def test_a_closed_checkpointer_says_so(cluster: rapidraid.LocalCluster, job: str) -> None:
    """A second `close` has no effect; every other call is refused."""
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        checkpointer.save(1, {"a": 1})
    checkpointer.close()
    for call in (lambda: checkpointer.save(2, {"a": 1}), lambda: checkpointer.load({"a": 1}), checkpointer.steps, checkpointer.latest):
        with pytest.raises(errors.InvalidError, match="is closed"):
            call()


def test_a_close_waits_longer_than_other_calls(cluster: rapidraid.LocalCluster, job: str) -> None:
    """The time for the commit has a limit of its own."""
    for node in cluster.nodes[3:]:
        cluster.pause(node)

    def resume() -> None:
        for node in cluster.nodes[3:]:
            cluster.resume(node)

    try:
        hasty = rapidraid.Checkpointer(job, config=cluster.config, commit_timeout=0.3)
        hasty.save(1, {"a": torch.ones(4)})
        with pytest.raises(errors.DeadlineError, match=r"the commit took longer than 0\.3 s"):
            hasty.close()
        assert hasty.is_closed
        with rapidraid.Checkpointer(f"{job}-patient", config=cluster.config) as patient:
            patient.save(1, {"a": torch.ones(4)})
            patient.timeout = 2.0
            threading.Timer(3.0, resume).start()
    finally:
        resume()


def test_a_closed_checkpointer_gives_its_memory_back(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Memory is released although the process continues, so a script that saves many jobs in turn does not fill it."""
    state = {"a": torch.ones(1 << 20)}
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        checkpointer.save(1, state)
    held = json.loads(cluster.command("stage", "--status", "--json"))
    mine = next(found for found in held["jobs"] if found["job"] == job)
    assert mine["members"] == 0
    assert [step["step"] for step in mine["steps"]] == [1], "the resume point stays"
    cluster.command("stage", "--free", job)
    held = json.loads(cluster.command("stage", "--status", "--json"))
    assert not [found for found in held["jobs"] if found["job"] == job and found["segment_bytes"]]


def test_retention_has_one_owner() -> None:
    """If the cluster's policy retires steps, ``keep`` is refused with a message that says what the policy keeps."""
    with rapidraid.local_cluster(6, settings={"policy.keep_newest": "3"}) as cluster:
        state = {"a": torch.ones(4)}
        checkpointer = rapidraid.Checkpointer("retired", config=cluster.config, keep=2)
        with pytest.raises(errors.InvalidError, match="policy keeps the newest 3") as raised:
            checkpointer.save(1, state)
        assert "leave keep out" in raised.value.hint
        with rapidraid.Checkpointer("retired", config=cluster.config) as other:
            other.save(1, state)


def test_a_daemon_that_died_is_started_again(cluster: rapidraid.LocalCluster, job: str) -> None:
    """The next save starts a new daemon, which recovers the state of the previous one."""
    config = cluster.config.with_name(f"{job}.toml")
    folder = Path(f"{cluster.staging}-{job}")
    config.write_text(cluster.config.read_text().replace(str(cluster.staging), str(folder)))

    def kill() -> None:
        held = json.loads(rapidraid.cluster._run([program(), "stage", "--status", "--json", "--config", str(config)]))
        os.kill(held["pid"], signal.SIGKILL)

    checkpointer = rapidraid.Checkpointer(job, config=config)
    try:
        checkpointer.save(1, {"a": torch.ones(4)})
        checkpointer.wait()
        kill()
        checkpointer.save(2, {"a": torch.full((4,), 2.0)})
        checkpointer.wait()
        assert [info.step for info in checkpointer.steps()] == [1, 2]
    finally:
        checkpointer.close()
        kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("code", ["None", "0", "'preempted'"])
def test_an_exit_with_success_waits_for_the_commit(cluster: rapidraid.LocalCluster, job: str, code: str) -> None:
    """A loop that was asked to end leaves the block by ``sys.exit``. An exit with an error does not wait."""
    script = (
        "import sys, torch, rapidraid\n"
        "with rapidraid.Checkpointer(sys.argv[1], config=sys.argv[2]) as c:\n"
        "    wait = c.wait\n"
        "    c.wait = lambda **limit: (print('waits', limit['timeout'] > 0), wait(**limit))\n"
        "    c.save(1, {'a': torch.ones(2)})\n"
        f"    sys.exit({code})\n"
    )
    done = subprocess.run([sys.executable, "-c", script, job, str(cluster.config)], capture_output=True, text=True, timeout=60)
    is_success = code != "'preempted'"
    assert f"waits {is_success}" in done.stdout and (done.returncode == 0) == is_success, done.stderr


def test_the_configuration_is_found_after_a_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that died is started again with it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rapidraid.toml").write_text("")
    assert find_config(None) == find_config("rapidraid.toml") == tmp_path / "rapidraid.toml"


def test_a_fork_releases_every_session_that_it_can(cluster: rapidraid.LocalCluster, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that another thread uses during the fork stays; the others are released all the same."""
    made = [rapidraid.Checkpointer(f"{job}-{number}", config=cluster.config) for number in range(2)]
    released: list[str] = []

    class Session:
        def __init__(self, job: str) -> None:
            self.job = job

        def leave_to_parent(self) -> None:
            released.append(self.job)
            raise RuntimeError("Already borrowed")

    sessions = [checkpointer._launch.session for checkpointer in made]
    monkeypatch.setattr(checkpointers, "_checkpointers", set(made))
    for checkpointer in made:
        checkpointer._launch.session = Session(checkpointer.job)  # type: ignore[assignment]
    checkpointers._after_fork()
    for checkpointer, session in zip(made, sessions, strict=True):
        checkpointer._launch.session = session
        checkpointer.leave()
    assert sorted(released) == [f"{job}-0", f"{job}-1"]


def test_a_step_whose_end_the_daemon_did_not_answer_is_staged(job: str) -> None:
    """A daemon that dies after the segment was marked finds the step there. A second try would be refused."""
    with rapidraid.local_cluster(6) as own, rapidraid.Checkpointer(job, config=own.config) as checkpointer:
        session = checkpointer._launch.session

        class DyingDaemon:
            def __getattr__(self, name: str) -> Any:
                return getattr(session, name)

            def stage(self, *arguments: Any) -> None:
                session.stage(*arguments)
                os.kill(own.daemon_pid(), signal.SIGKILL)
                raise errors.UnavailableError("the daemon is gone", "try again")

        checkpointer.prepare({"a": torch.zeros(2)})
        checkpointer._launch.session = DyingDaemon()  # type: ignore[assignment]
        assert checkpointer.save(1, {"a": torch.ones(2)})
        checkpointer._launch.session = session
        checkpointer.wait(1)
        assert [info.step for info in checkpointer.steps()] == [1]


def test_signals_are_given_back(cluster: rapidraid.LocalCluster, job: str) -> None:
    """After the end the previous signal handler is in place again."""
    before = signal.getsignal(signal.SIGUSR1)
    with rapidraid.Checkpointer(job, config=cluster.config, save_on=signal.SIGUSR1):
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_forked_child_has_the_earlier_handlers(cluster: rapidraid.LocalCluster, job: str) -> None:
    """A child that only set a flag would survive its parent's ``terminate``, and the parent would wait for it at its end."""
    with (
        rapidraid.Checkpointer(job, config=cluster.config, save_on=signal.SIGTERM) as first,
        rapidraid.Checkpointer(f"{job}-more", config=cluster.config, save_on=signal.SIGTERM) as second,
    ):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60.0,), daemon=True)
        child.start()
        time.sleep(0.2)
        child.terminate()
        child.join(10.0)
        exit_code = child.exitcode
        child.kill()
        assert exit_code == -signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
        assert second.should_stop and not first.should_stop, "the parent keeps its handler"


def test_signals_are_set_in_the_main_thread_alone(cluster: rapidraid.LocalCluster, job: str) -> None:
    """Python refuses them elsewhere. The error comes before a session begins."""
    told: list[BaseException] = []

    def make() -> None:
        try:
            rapidraid.Checkpointer(job, config=cluster.config, save_on=signal.SIGUSR1)
        except errors.InvalidError as error:
            told.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(told)
