"""The table and the pictures of a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: The markers around the table in the page.
BEGIN, END = "<!-- table -->", "<!-- end -->"


def _text_of(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def table(record: dict[str, Any]) -> str:
    """Returns the measures as a table in Markdown."""
    lines = ["| measure | median | reference in the same run | ratio (smallest to largest) | bar | |", "|---|---|---|---|---|---|"]
    for measure in record["measures"]:
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


def report(file: Path, folder: Path) -> None:
    """Prints the table, writes it into the page, and draws the pictures beside the page."""
    record = json.loads(file.read_text())
    print(table(record))
    page = folder / "trainers.md"
    if page.is_file():
        before, _, rest = page.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}\n{table(record)}{END}{after}")
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

    measures = record["measures"][::-1]
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
