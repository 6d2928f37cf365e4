"""Runs measures and writes their results."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import device, frameworks, host, links, peers, state, titan
from .integrations import integrations
from .record import keep, say
from .report import report

MEASURES = {
    "stall": host.stall,
    "upload": host.upload,
    "memory": host.memory,
    "resume": host.resume,
    "commit": links.commit,
    "joint": links.joint,
    "load": links.load,
    "preempt": links.preempt,
    "share": links.share,
    "peers": peers.peers,
    "linked-peers": peers.linked_peers,
    "dcp": frameworks.through_dcp,
    "plan": frameworks.plan,
    "titan": titan.through_titan,
    "integrations": integrations,
    "device": device.device,
}


def main() -> None:
    """Parses the arguments, measures, and writes the record after each measure."""
    parser = argparse.ArgumentParser(prog="cargo xtask bench trainers", description="Measures what a trainer sees.")
    parser.add_argument("--only", action="append", choices=MEASURES, help="measure only these")
    parser.add_argument("--short", action="store_true", help="a small state, twice: whether it works, not how fast")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--record", type=Path, required=True, help="the file of the measures; other measures in it stay")
    parser.add_argument("--pictures", type=Path, required=True, help="the folder of the pictures")
    parser.add_argument("--plot", action="store_true", help="only draw the pictures again")
    options = parser.parse_args()
    file = options.record
    if not options.plot:
        repeats, large_bytes = (2, 256 << 10) if options.short else (options.repeats, state.LARGE_BYTES)
        settings = {
            "state": {"large": state.LARGE, "large_bytes": large_bytes, "small": state.SMALL, "small_bytes": state.SMALL_BYTES},
            "links": "six nodes at 200 Mbit/s, the training host at 1 Gbit/s, MTU 9000, (6,4), blocks of 16 MiB",
        }
        for name in options.only or MEASURES:
            say(f"{name}: {MEASURES[name].__doc__}")
            for measure in MEASURES[name](repeats, large_bytes):
                command = f"cargo xtask bench trainers --only {name}" + " --short" * options.short
                keep([measure], file, command, settings)
                say(f"{measure.name}: ratio {measure.ratio} spread {measure.spread} met {measure.is_met} {measure.facts}")
    if not file.is_file():
        say("nothing was measured")
        return
    report(file, options.pictures)
    print(file)


if __name__ == "__main__":
    main()
