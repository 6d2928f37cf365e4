"""The table and the pictures of a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import integrations, peers

#: The markers around a table in the page.
BEGIN, PEERS, FAULTS, END = "<!-- table -->", "<!-- peers -->", "<!-- faults -->", "<!-- end -->"
INTEGRATIONS, LINKED = "<!-- integrations -->", "<!-- linked-peers -->"
#: The faults of ``trainers.faults`` in words.
WORDS = {
    "bit": "a flipped bit",
    "file": "a missing file",
    "kill": "`kill -9` while the same id is overwritten",
    "stop": "one source stopped for ever",
}


def _text_of(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def table(record: dict[str, Any]) -> str:
    """Returns the measures as a table in Markdown."""
    lines = ["| measure | median | reference in the same run | ratio (smallest to largest) | bar | |", "|---|---|---|---|---|---|"]
    for measure in _in_main_table(record):
        references = [arm for arm in measure["references"] if arm in measure["arms"]]
        best = min(references, key=lambda arm: _median(measure["arms"][arm]))
        others = [arm for arm in measure["arms"] if arm != measure["subject"]]
        beside = ", ".join(f"{arm} {_text_of(_median(measure['arms'][arm]))}" for arm in sorted(others, key=lambda arm: arm != best))
        low, high = measure["spread"]
        limit = "-" if measure["limit"] is None else f"{measure['limit']:g}x"
        if measure["allowance_s"]:
            limit += f" + {measure['allowance_s']:g} s"
        met = {True: "met", False: "**missed**", None: ""}[measure["is_met"]]
        median = _text_of(_median(measure["arms"][measure["subject"]]))
        lines.append(f"| {measure['title']} | {median} | {beside} | {measure['ratio']:.2f} ({low:.2f} to {high:.2f}) | {limit} | {met} |")
    return "\n".join(lines) + "\n"


def _in_main_table(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [measure for measure in record["measures"] if not measure["name"].startswith((*peers.PLACES, integrations.PREFIX))]


def _with_prefix(record: dict[str, Any], prefix: str) -> dict[str, dict[str, Any]]:
    """Returns the measures whose names begin so, by the rest of their names."""
    return {measure["name"].removeprefix(prefix): measure for measure in record["measures"] if measure["name"].startswith(prefix)}


def _cell(times: list[float] | None, is_ratio: bool) -> str:
    if not times:
        return "-"
    text = "{:.2f}".format if is_ratio else _text_of
    if len(times) == 1:
        return text(times[0])
    return f"{text(_median(times))} ({text(min(times))} to {text(max(times))})"


def peers_table(record: dict[str, Any], place: peers.Place) -> str:
    """Returns the measures of rapidraid beside other libraries as a table in Markdown."""
    measures = _with_prefix(record, place.prefix)
    if not measures:
        return ""
    facts = measures["stall"]["facts"]
    titles = ["", *(title for title, _ in place.titles().values()), "verified on load", "copies in memory at a save", "copies afterwards"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, words in facts["contestants"].items():
        if name in facts["not to be had"]:
            lines.append(f"| {name} | not to be had: {facts['not to be had'][name]} |" + " |" * (len(titles) - 2))
            continue
        cells = [_cell(measures[column]["arms"].get(name), is_ratio) for column, (_, is_ratio) in place.titles().items()]
        lines.append(f"| {' | '.join([name, *cells, words['verifies'], words['memory'], words['durable']])} |")
    return "\n".join(lines) + "\n"


def integrations_table(record: dict[str, Any]) -> str:
    """Returns the measures of the integrations beside SeaweedFS as a table in Markdown."""
    measures = _with_prefix(record, integrations.PREFIX)
    if not measures:
        return ""
    lines = [f"| | {' | '.join(integrations.COLUMNS.values())} |", "|---" * (len(integrations.COLUMNS) + 1) + "|"]
    jobs = dict.fromkeys(name.rpartition("-")[0] for name in measures)
    for job in jobs:
        cells = []
        for column in integrations.COLUMNS:
            measure = measures[f"{job}-{column}"]
            ours, theirs = (_text_of(_median(measure["arms"][arm])) for arm in (integrations.OURS, integrations.THEIRS))
            low, high = measure["spread"]
            cells.append(f"{ours}, {theirs}: {measure['ratio']:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {measures[f'{job}-stall']['title']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def faults_table(record: dict[str, Any]) -> str:
    """Returns the outcomes of faults as a table in Markdown."""
    outcomes = record["outcomes"]
    names = sorted(outcomes, key=lambda name: name != "rapidraid")
    lines = [f"| fault | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for fault, words in WORDS.items():
        cells = [", ".join(f"{count} {outcome}" for outcome, count in outcomes[name].get(fault, {}).items()) or "-" for name in names]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _replace(page: Path, marker: str, text: str) -> None:
    before, begin, rest = page.read_text().partition(marker)
    _, end, after = rest.partition(END)
    if begin and end:
        page.write_text(f"{before}{begin}\n{text}{end}{after}")


def report(file: Path, folder: Path) -> None:
    """Prints the tables, writes them into the page, and draws the pictures beside the page."""
    record = json.loads(file.read_text())
    tables = {
        BEGIN: table(record),
        PEERS: peers_table(record, peers.ON_TMPFS),
        LINKED: peers_table(record, peers.OVER_LINKS),
        INTEGRATIONS: integrations_table(record),
    }
    print(*tables.values(), sep="\n")
    page = folder / "trainers.md"
    if page.is_file():
        for marker, text in tables.items():
            _replace(page, marker, text)
        faults = file.with_name("faults-peers.json")
        if faults.is_file():
            _replace(page, FAULTS, faults_table(json.loads(faults.read_text())))
    try:
        import matplotlib
    except ImportError:
        print("no pictures: matplotlib is not installed")
        return
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "rapidraid", "font.size": 9, "font.family": "sans-serif"})
    _ratios(record, folder / "trainers.svg")
    _steps(record, folder / "trainers-steps.svg")


def _ratios(record: dict[str, Any], file: Path) -> None:
    import matplotlib.pyplot as plt

    measures = _in_main_table(record)[::-1]
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(measures) + 1.2))
    for at, measure in enumerate(measures):
        low, high = measure["spread"]
        axes.plot([low, high], [at, at], color="#b0bec5", linewidth=5, solid_capstyle="round", zorder=1)
        axes.scatter([measure["ratio"]], [at], color="#1565c0" if measure["is_met"] is not False else "#c62828", zorder=3)
        if measure["limit"] is not None:
            reference = min(_median(measure["arms"][arm]) for arm in measure["references"] if arm in measure["arms"])
            limit = measure["limit"] + measure["allowance_s"] / reference
            axes.scatter([limit], [at], marker="|", s=260, color="black", zorder=2)
    axes.axvline(1.0, color="#757575", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(measures)), [measure["title"].replace("`", "").replace("*", "") for measure in measures])
    axes.set_xlabel("times the reference in the same run\nmedian (dot), smallest to largest (grey), bar (black)")
    axes.set_xlim(left=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def _steps(record: dict[str, Any], file: Path) -> None:
    import matplotlib.pyplot as plt

    measures = [measure for measure in record["measures"] if measure["name"] in ("upload", "beside")]
    if not measures:
        return
    figure, plots = plt.subplots(1, len(measures), figsize=(4.5 * len(measures), 3.2), squeeze=False)
    for axes, measure in zip(plots[0], measures, strict=True):
        for arm, times in sorted(measure["arms"].items()):
            axes.plot([time * 1000 for time in sorted(times)], [at / len(times) for at in range(len(times))], label=arm)
        axes.set_title(measure["title"], fontsize=9, wrap=True)
        axes.set_xlabel("milliseconds of a step")
        axes.set_ylabel("share of steps")
        axes.legend(frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
