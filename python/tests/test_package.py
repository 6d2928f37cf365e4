"""The package itself: the libraries it links, the content of its wheel, and its exceptions."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rapidraid
from rapidraid import _native, _program, _values, errors


def test_the_extension_has_no_network_and_no_async_runtime() -> None:
    """A trainer may fork, so the extension must not have threads or network sockets of its own."""
    library = Path(_native.__file__)
    symbols = subprocess.run(["readelf", "--dyn-syms", "-W", str(library)], capture_output=True, text=True, check=True).stdout
    content = library.read_bytes()
    for name in [b"tokio", b"quinn", b"rustls", b"sled"]:
        assert name not in content, name
    imported = set(re.findall(r"UND (\w+)", symbols))
    assert "socket" in imported or "connect" in imported, "it talks to the daemon"
    assert not imported & {"getaddrinfo", "sendto", "recvfrom", "epoll_create1", "pthread_atfork"}


def test_the_program_is_in_the_package() -> None:
    """`rapidraid` and `python -m rapidraid` run the program in the package."""
    done = subprocess.run([sys.executable, "-m", "rapidraid", "--version"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and done.stdout.startswith("rapidraid "), done.stderr
    assert Path(_program.program()).is_file()
    assert done.stdout.split()[1] == rapidraid.__version__


@pytest.mark.parametrize("file", [_native.__file__, _program.program()])
def test_the_wheel_runs_with_the_glibc_that_it_states(file: str) -> None:
    """The wheel's tag covers only the extension; the program must comply with it too."""
    shown = subprocess.run(["readelf", "-V", file], capture_output=True, text=True, check=True).stdout
    needed = {tuple(int(part) for part in version.split(".")) for version in re.findall(r"GLIBC_([0-9.]+)", shown)}
    assert needed and max(needed) <= (2, 34)


def test_importing_the_package_imports_no_torch() -> None:
    """Torch and numpy are optional, so the package must not import them."""
    code = "import sys, rapidraid; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_exceptions_are_one_tree() -> None:
    """Each exception has a hint, can be pickled, and derives from the matching built-in exception."""
    for kind, python in [
        ("invalid", ValueError),
        ("not_found", LookupError),
        ("exists", FileExistsError),
        ("denied", PermissionError),
        ("unavailable", ConnectionError),
        ("timeout", TimeoutError),
        ("io", OSError),
    ]:
        error = errors.of_kind(kind, "it failed", "do this")
        assert isinstance(error, rapidraid.RapidraidError) and isinstance(error, python)
        assert str(error) == "it failed (hint: do this)"
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and (again.message, again.hint) == ("it failed", "do this")
    assert type(errors.of_code(5, "", "")) is errors.FencedError
    assert type(errors.of_code(99, "", "")) is errors.InternalError


@pytest.mark.parametrize("content", [b"", b"\x0a\xff\xff\xff\xff\x0f", b"\x63", b"\x08\x01\xff", b"\x00\x00"])
def test_hostile_values_are_refused(content: bytes) -> None:
    """Malformed values are refused without running code or allocating memory."""
    with pytest.raises((errors.CorruptError, errors.InvalidError)):
        _native.decode_value(content)


def test_a_value_of_an_unknown_kind_is_refused() -> None:
    """A newer version of the package may have written the value."""
    named = b"\x0d\x07unknown\x00"
    with pytest.raises(errors.InvalidError, match="unknown kind"):
        _native.decode_value(named)


def test_a_dict_that_grows_while_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread adds a metric. The dict is stored as it was when its turn came."""
    metrics: dict[str, Any] = {"loss": OrderedDict(), "rate": OrderedDict()}
    describe = _values.describe

    def describe_and_grow(value: Any) -> Any:
        metrics[f"more {len(metrics)}"] = 1.0
        return describe(value)

    monkeypatch.setattr(_values, "describe", describe_and_grow)
    content = _native.encode_value(metrics)
    assert content is not None and len(metrics) == 4
    assert _native.decode_value(content) == {"loss": OrderedDict(), "rate": OrderedDict()}


def test_the_program_lists_what_a_step_holds(cluster: rapidraid.LocalCluster, job: str) -> None:
    """`rapidraid show JOB/STEP --tensors` prints each name in the form that `read` accepts."""
    torch = pytest.importorskip("torch")
    weight = torch.arange(12.0).reshape(3, 4)
    state = {"model": rapidraid.replicated({"weight": weight, "tied": weight}), "seed": 7, "half": torch.ones(2, dtype=torch.bfloat16)}
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        checkpointer.save(3, state)
    shown = json.loads(cluster.command("show", f"{job}/3", "--tensors", "--json"))
    names = {name["name"]: name for name in shown["names"]}
    assert list(names) == ["model/tied", "model/weight", "rank 0: half", "rank 0: seed"]
    assert names["model/weight"]["shape"] == [3, 4] and names["model/weight"]["dtype"] == "float32"
    assert names["model/weight"]["regions"] == names["model/tied"]["regions"]
    assert names["rank 0: half"]["dtype"] == "bfloat16" and names["rank 0: seed"]["kind"] == "value"
    reader = rapidraid.Checkpointer(job, config=cluster.config)
    for name in names:
        assert reader.read(3, name) is not None
    text = cluster.command("show", f"{job}/latest", "--tensors", "--names", "model/*")
    assert "2 names in 2 regions, 48 B" in text and "seed" not in text


def test_arrays_are_read_without_torch(cluster: rapidraid.LocalCluster, job: str) -> None:
    """An array needs numpy alone. A tensor imports torch."""
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    with rapidraid.Checkpointer(job, config=cluster.config) as checkpointer:
        checkpointer.save(1, {"array": numpy.arange(3, dtype="uint16"), "tensor": torch.ones(2)})
    code = (
        "import sys, rapidraid\n"
        "with rapidraid.Checkpointer(sys.argv[1], config=sys.argv[2]) as c:\n"
        "    array = c.read(1, 'array')\n"
        "    assert array.dtype == 'uint16' and array.tolist() == [0, 1, 2] and 'torch' not in sys.modules\n"
        "    assert c.read(1, 'tensor').tolist() == [1, 1]\n"
    )
    subprocess.run([sys.executable, "-c", code, job, str(cluster.config)], check=True, timeout=60)


def test_a_cluster_of_four_nodes_saves() -> None:
    """It has too few nodes for the default codes."""
    with rapidraid.local_cluster(4) as cluster, rapidraid.Checkpointer("four", config=cluster.config) as checkpointer:
        checkpointer.save(1, {"x": np.ones(3)})
        assert checkpointer.wait(1, timeout=60) == []


def test_a_wait_says_why_a_step_is_not_saved(caplog: pytest.LogCaptureFixture) -> None:
    """The warning comes during the wait, and is not repeated."""
    with rapidraid.local_cluster(3) as cluster:
        checkpointer = rapidraid.Checkpointer("three", config=cluster.config)
        checkpointer.save(1, {"x": np.ones(3)})
        with pytest.raises(errors.DeadlineError, match="3 storage nodes are live"):
            checkpointer.wait(1, timeout=10)
        checkpointer.leave()
    warnings = [record.getMessage() for record in caplog.records if "attempts to save it fail" in record.getMessage()]
    assert len(warnings) == 1
    assert "start more nodes" in warnings[0]


def test_a_cluster_is_used_again_with_more_hosts(tmp_path: Path) -> None:
    """The hosts that it did not have before get their configurations."""
    with rapidraid.local_cluster(3, folder=tmp_path / "cluster") as cluster:
        before = cluster.config.read_text()
    with rapidraid.local_cluster(3, folder=tmp_path / "cluster", hosts=2) as cluster:
        assert cluster.config.read_text() == before
        assert [path.read_text().count("[staging]") for path in cluster.configs] == [1, 1]
        assert cluster.daemon_pid(0) != cluster.daemon_pid(1)
