"""The recipes for Kubernetes and Slurm, as far as one machine can run them.

A pod is a process with process ids, mounts and 64 MiB of ``/dev/shm`` of its own. Slurm's ``srun`` is a script that runs
its command on this host.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rapidraid
from rapidraid._program import program

yaml = pytest.importorskip("yaml")
pytest.importorskip("numpy")

CLUSTER = Path(__file__).parent.parent.parent / "cluster"
CONFIGURATION = CLUSTER.parent / "docs" / "configuration.md"
STATE_BYTES = 80 << 20
LIMIT_S = 60

#: Saves or loads a state larger than a pod's /dev/shm. Prints what it has done, and then waits to be killed.
TRAINER = f"""
import os, sys, time
import numpy, rapidraid
what, job = sys.argv[1:]
state = {{"weights": numpy.zeros({STATE_BYTES} // 4, numpy.float32), "step": 0}}
checkpointer = rapidraid.Checkpointer(job, start=False)
if what == "save":
    state = {{"weights": numpy.full({STATE_BYTES} // 4, 3.0, numpy.float32), "step": 5}}
    checkpointer.save(5, state)
    print("saved", flush=True)
    time.sleep(60)
step = checkpointer.load(state)
print("loaded", step, state["step"], float(state["weights"].min()), float(state["weights"].max()), flush=True)
"""


def documents() -> dict[str, Any]:
    """Returns the objects of the Kubernetes recipe, by kind."""
    return {found["kind"]: found for found in yaml.safe_load_all((CLUSTER / "kubernetes" / "rapidraid-stage.yaml").read_text())}


def test_pods_and_daemon_meet_in_one_folder() -> None:
    found = documents()
    specs = [found[kind]["spec"]["template"]["spec"] for kind in ("DaemonSet", "Job")]
    for spec in specs:
        (container,) = spec["containers"]
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        mounts = {entry["name"]: entry["mountPath"] for entry in container["volumeMounts"]}
        volumes = {entry["name"]: entry for entry in spec["volumes"]}
        assert environment["RAPIDRAID_STAGING_DIR"] == mounts["staging"] == volumes["staging"]["hostPath"]["path"]
        of_init = {mount["name"] for init in spec.get("initContainers", []) for mount in init["volumeMounts"]}
        assert mounts.keys() | of_init == volumes.keys()
        assert spec["securityContext"]["runAsUser"] == 1000
        assert spec["nodeSelector"] == specs[0]["nodeSelector"] and spec["tolerations"] == specs[0]["tolerations"]
    assert found["Service"]["metadata"]["name"] == specs[1]["subdomain"]
    assert found["Service"]["spec"]["selector"] == found["Job"]["spec"]["template"]["metadata"]["labels"]
    assert f"{found['Job']['metadata']['name']}-0.{specs[1]['subdomain']}:" in " ".join(specs[1]["containers"][0]["command"])
    own = specs[0]["initContainers"][0]
    assert own["command"][-1] == mounts["staging"] and own["command"][own["command"].index("-o") + 1] == "1000"
    unit = (CLUSTER / "rapidraid-stage.service").read_text()
    assert f"TimeoutStopSec={specs[0]['terminationGracePeriodSeconds']}\n" in unit


def test_trainers_get_no_key() -> None:
    recipe = (CLUSTER / "kubernetes" / "rapidraid-stage.yaml").read_text()
    spec = documents()["Job"]["spec"]["template"]["spec"]
    secrets = [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume]
    assert secrets == ["rapidraid-trainer"]
    created = [line for line in recipe.splitlines() if "create secret generic rapidraid-trainer" in line]
    assert [line.split("--from-file=")[1:] for line in created] == [["client/rapidraid.toml"]]


def can_make_pods() -> bool:
    """Returns whether this machine lets this user make namespaces."""
    done = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return done.returncode == 0


class Pods:
    """The host of the pods: the folder that they share, and how one is started."""

    def __init__(self, config: Path, client: Path) -> None:
        # A secret's files can be read by all. The daemon's pod makes a copy for its user; a trainer's pod has only the
        # configuration.
        secret = client.with_name("secret")
        for folder in (secret, client):
            folder.mkdir()
        for file in config.parent.iterdir():
            shutil.copy(file, secret)
            (secret / file.name).chmod(0o444)
        *_, script = documents()["DaemonSet"]["spec"]["template"]["spec"]["initContainers"][-1]["command"]
        script = script.replace("/secret/", f"{secret}/").replace("/etc/rapidraid/", f"{client}/")
        subprocess.run(["sh", "-c", script], check=True)
        self.config = client / config.name
        self.trainers_config = client.with_name("trainer") / config.name
        self.trainers_config.parent.mkdir()
        shutil.copy(config, self.trainers_config)
        self.host = Path(tempfile.mkdtemp(prefix="rapidraid-pods-", dir="/dev/shm"))
        self.path = documents()["DaemonSet"]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]["mountPath"]
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Starts a command as a pod's only process."""
        mounts = (
            'set -e; mkdir -p "$1"; mount --bind "$0" /mnt; mount -t tmpfs -o size=64m tmpfs /dev/shm; mkdir -p "$1"; '
            'mount --bind /mnt "$1"; mount -t proc proc /proc; shift; exec "$@"'
        )
        environment = {**os.environ, "RAPIDRAID_CONFIG": str(self.trainers_config), "RAPIDRAID_STAGING_DIR": self.path}
        pod = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
            + ["sh", "-c", mounts, str(self.host), self.path, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self.running.append(pod)
        return pod

    def stop(self) -> None:
        for pod in self.running:
            pod.kill()
            pod.wait()
        shutil.rmtree(self.host, ignore_errors=True)


@pytest.fixture
def pods(cluster: rapidraid.LocalCluster, tmp_path: Path) -> Iterator[Pods]:
    if not can_make_pods():
        pytest.skip("`unshare --mount --pid` needs root")
    running = Pods(cluster.config, tmp_path / "client")
    yield running
    running.stop()


def line_of(pod: subprocess.Popen[str], begin: str) -> str:
    """Returns the next line of a pod that begins so."""
    assert pod.stdout is not None
    seen = []
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and (line := pod.stdout.readline()):
        seen.append(line)
        if line.startswith(begin):
            return line
    raise AssertionError("".join(seen))


def test_a_pod_that_is_killed_resumes_from_the_daemons_pod(pods: Pods, job: str) -> None:
    """The state is larger than the pods' ``/dev/shm``: segments come through the socket."""
    command = documents()["DaemonSet"]["spec"]["template"]["spec"]["containers"][0]["command"]
    daemon = pods.start(program(), *command[1:2], "--config", str(pods.config))
    until = time.monotonic() + LIMIT_S
    while not any(path.is_socket() for path in pods.host.rglob("*")):
        assert daemon.poll() is None and time.monotonic() < until, daemon.stdout
        time.sleep(0.05)
    trainer = pods.start(sys.executable, "-c", TRAINER, "save", job)
    line_of(trainer, "saved")
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    again = pods.start(sys.executable, "-c", TRAINER, "load", job)
    assert line_of(again, "loaded") == "loaded 5 5 3.0 3.0\n"


def slurm_tools(folder: Path, **commands: str) -> dict[str, str]:
    """Makes an `srun` that runs its command on this host, an `scontrol` that logs its words, and `commands`.

    Returns the environment of a batch script that finds them.
    """
    tools = folder / "tools"
    tools.mkdir()
    scripts = {
        "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
        "scontrol": f'echo "$@" >> {folder}/scontrol; echo host-1; echo host-2',
    }
    for name, text in {**scripts, **commands}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "host-[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": "1",
    }


def test_the_slurm_recipe_has_time_for_all_its_waits() -> None:
    script = (CLUSTER / "slurm" / "train.sbatch").read_text()
    (signal_s,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", script, re.MULTILINE)
    (shutdown_s,) = re.findall(r"--shutdown-timeout=(\d+)", script)
    (stop_s,) = re.findall(r"^\| `staging.stop_s` .*? \| `(\d+)` \|", CONFIGURATION.read_text(), re.MULTILINE)
    assert int(signal_s) >= int(shutdown_s) + int(stop_s) + 60


@pytest.mark.parametrize("signalled", ["training", "saving", "both"])
def test_a_signal_does_not_end_the_slurm_recipes_wait_for_the_daemon(signalled: str, tmp_path: Path) -> None:
    """A job is queued again only if the signal came before training had ended."""
    environment = slurm_tools(
        tmp_path,
        rapidraid='[ "$2" = --config ] || exit 0; trap "echo saving; sleep 1; : > $0.saved; exit" TERM; while :; do sleep 0.05; done',
        torchrun=f'trap "exit 9" TERM; echo trains; while [ ! -e {tmp_path}/end ]; do sleep 0.05; done; exit 7',
    )
    batch = subprocess.Popen(
        ["bash", str(CLUSTER / "slurm" / "train.sbatch"), "train.py"],
        env={**environment, "RAPIDRAID_CONFIG": "none"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    line_of(batch, "trains")
    if signalled in ("training", "both"):
        batch.send_signal(signal.SIGTERM)
    else:
        (tmp_path / "end").touch()
    line_of(batch, "saving")
    if signalled in ("saving", "both"):
        batch.send_signal(signal.SIGTERM)
    assert batch.wait(LIMIT_S) == (7 if signalled == "saving" else 9)
    assert (tmp_path / "tools" / "rapidraid.saved").exists()
    assert ("requeue 1\n" in (tmp_path / "scontrol").read_text()) == (signalled != "saving")


def test_the_slurm_recipe_ends_the_daemon_after_it_has_saved(cluster: rapidraid.LocalCluster, job: str, tmp_path: Path) -> None:
    tools = slurm_tools(
        tmp_path,
        rapidraid=f'exec "{program()}" "$@"',
        torchrun=f'while [ "${{1#-}}" != "$1" ]; do shift; done; exec "{sys.executable}" "$@"',
    )
    staging = Path(tempfile.mkdtemp(prefix="rapidraid-slurm-", dir="/dev/shm"))
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, numpy, rapidraid\n"
        "checkpointer = rapidraid.Checkpointer(sys.argv[1], start=False)\n"
        "checkpointer.save(3, {'weights': numpy.ones(1000)})\n"
        "sys.exit(7)\n"
    )
    environment = {**tools, "RAPIDRAID_CONFIG": str(cluster.config), "RAPIDRAID_STAGING_DIR": str(staging / "folder")}
    try:
        done = subprocess.run(
            ["bash", str(CLUSTER / "slurm" / "train.sbatch"), str(script), job],
            env=environment, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 7, done.stderr
        listed = cluster.command("ls", job, "--json")
        assert '"step":3' in listed.replace(" ", ""), (listed, done.stderr)
        assert "requeue" not in (tmp_path / "scontrol").read_text()
        # Before the time limit training saves once more, and the job is queued again.
        script.write_text(
            "import sys, time, signal, numpy, rapidraid\n"
            "checkpointer = rapidraid.Checkpointer(sys.argv[1], start=False, save_on=signal.SIGTERM)\n"
            "state = {'weights': numpy.ones(1000)}\n"
            "checkpointer.load(state)\n"
            "print('trains', flush=True)\n"
            "while not checkpointer.should_stop: time.sleep(0.01)\n"
            "checkpointer.save(4, state)\n"
            "sys.exit(9)\n"
        )
        batch = subprocess.Popen(
            ["bash", str(CLUSTER / "slurm" / "train.sbatch"), str(script), job], env=environment, stdout=subprocess.PIPE, text=True
        )
        line_of(batch, "trains")
        batch.send_signal(signal.SIGTERM)
        assert batch.wait(LIMIT_S) == 9
        assert '"step":4' in cluster.command("ls", job, "--json").replace(" ", "")
        assert "requeue 1\n" in (tmp_path / "scontrol").read_text()
    finally:
        shutil.rmtree(staging, ignore_errors=True)
