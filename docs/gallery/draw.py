"""Draws the gallery: every schedule that has a name, for the same model, and a page that compares some of them."""

from pathlib import Path

import pipeloom as pl

RANKS, MICROBATCHES = 4, 8
COMPARED = ("1F1B", "ZBVZeroBubble", "DualPipeV")


def timeline(name: str) -> pl.Timeline:
    """A schedule in which F, I and W take one unit each for a rank's share of the model."""
    schedule = pl.schedules.make(name, ranks=RANKS, microbatches=MICROBATCHES)
    share = RANKS / (schedule.wiring.stages * schedule.wiring.pieces)
    return pl.simulate(schedule, pl.Costs(F=share, I=share, W=share, activation=share))


def main(folder: Path) -> None:
    for name in pl.schedules.names():
        pl.draw(timeline(name), folder / f"{name}.svg")
    pl.draw([timeline(name) for name in COMPARED], folder / "compare.svg")
    pl.draw([timeline(name) for name in COMPARED], folder / "compare.html", memory=4)
    sections = (
        f"## {recipe.name}\n\n{recipe.description[0].upper()}{recipe.description[1:]}. {recipe.source}\n\n"
        f"![{recipe.name}]({recipe.name}.svg)\n"
        for recipe in pl.schedules.RECIPES
    )
    (folder / "README.md").write_text("\n".join([HEAD, *sections]))


HEAD = f"""# Gallery

Every schedule that has a name, with {RANKS} ranks and {MICROBATCHES} microbatches. F, I and W take one unit of time
for a rank's share of the model, B takes two, and messages are free. `make gallery` draws them;
[pictures.md](../pictures.md) says how to draw your own.
"""

if __name__ == "__main__":
    main(Path(__file__).parent)
