"""The meaning of a schedule, played through one action at a time: the oracle of the checker. It shares no code with it.

Also random schedules of any wiring, and random mistakes in them.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from pipeloom import Action, Kind, Schedule, Wiring

BACKWARDS = ("B", "I", "W")
Value = tuple[str, int, int]
"""An output ("out") or an input gradient ("grad") of a stage and microbatch."""


class Wrong(Exception):  # noqa: N818 - a verdict
    """The schedule is wrong."""


def is_right(schedule: Schedule) -> bool:
    """Whether the schedule computes everything once, ends, and keeps every other rule."""
    try:
        _count(schedule)
        _play(schedule)
        _look_at_weights(schedule)
    except Wrong:
        return False
    return True


def edges(wiring: Wiring) -> list[tuple[int, int]]:
    """All edges (from stage, to stage) of all copies."""
    found = []
    for copy in range(wiring.copies):
        base = copy * wiring.stages
        found += [(base + stage, base + stage + 1) for stage in range(wiring.stages - 1)]
        found += [(base + source, base + target) for source, target in wiring.skips]
    return found


def work(wiring: Wiring, microbatches: int) -> set[tuple[int, int]]:
    """The (stage, microbatch) pairs that are to be run: batches are dealt out to the copies in equal shares."""
    batches = microbatches // wiring.pieces
    share = (batches + wiring.copies - 1) // wiring.copies
    return {
        (batch // share * wiring.stages + stage, batch * wiring.pieces + piece)
        for batch in range(batches)
        for piece in range(wiring.pieces)
        for stage in range(wiring.stages)
    }


def needs(action: Action, wiring: Wiring) -> set[Value]:
    """The values that a compute action takes in."""
    stage, microbatch = action.stage, action.microbatch
    piece = microbatch % wiring.pieces
    if action.kind == "W":
        return {("grad", stage, microbatch)}
    if action.kind == "F":
        before = {("out", stage, microbatch - 1)} if piece > 0 else set()
        return before | {("out", source, microbatch) for source, target in edges(wiring) if target == stage}
    after = {("grad", stage, microbatch + 1)} if piece < wiring.pieces - 1 else set()
    above = {("grad", target, microbatch) for source, target in edges(wiring) if source == stage}
    return after | above | {("out", stage, microbatch)}


def makes(action: Action) -> set[Value]:
    """The values that a compute action gives to others."""
    if action.kind == "W":
        return set()
    return {("out" if action.kind == "F" else "grad", action.stage, action.microbatch)}


def _count(schedule: Schedule) -> None:
    wiring = schedule.wiring
    stages = range(wiring.stages * wiring.copies)
    if set(schedule.placement) != set(stages):
        raise Wrong("a stage is not placed")
    if not all(0 <= rank < len(schedule.rows) for rank in schedule.placement.values()):
        raise Wrong("a rank is not there")
    if schedule.microbatches < 1 or schedule.microbatches % wiring.pieces:
        raise Wrong("the number of microbatches")
    done: Counter[tuple[str, int, int]] = Counter()
    for rank, row in enumerate(schedule.rows):
        for cell in row:
            for action in cell.parts or (cell,):
                if schedule.placement.get(action.stage) != rank:
                    raise Wrong(f"{action} is not on its rank")
                if action.kind in ("F", *BACKWARDS):
                    done[action.kind, action.stage, action.microbatch] += 1
    pairs = work(wiring, schedule.microbatches)
    trains = any(kind in BACKWARDS for kind, _, _ in done)
    if any(pair[1:] not in pairs for pair in done):
        raise Wrong("something is run that is not to be run")
    for stage, microbatch in pairs:
        forward, whole, inputs, weights = (done[kind, stage, microbatch] for kind in ("F", *BACKWARDS))
        if forward != 1 or (whole, inputs, weights) not in (((1, 0, 0), (0, 1, 1)) if trains else ((0, 0, 0),)):
            raise Wrong(f"stage {stage}, microbatch {microbatch} is not run once")


class _Channel:
    """From one rank to another: receives wait in line, a send takes the first and blocks while there is none."""

    def __init__(self) -> None:
        self.posted: list[tuple[Value, int]] = []
        self.arrived: set[tuple[Value, int]] = set()


def _play(schedule: Schedule) -> None:
    placement, wiring = schedule.placement, schedule.wiring
    messages = any("SEND" in cell.kind or "RECV" in cell.kind for row in schedule.rows for cell in row)
    trains = any(part.kind in BACKWARDS for row in schedule.rows for cell in row for part in cell.parts or (cell,))
    here: list[set[Value]] = [set() for _ in schedule.rows]
    channels = {(a, b): _Channel() for a in range(schedule.ranks) for b in range(schedule.ranks)}
    sent: Counter[tuple[Value, int]] = Counter()
    received: Counter[tuple[Value, int]] = Counter()

    def message(action: Action) -> tuple[int, int, tuple[Value, int]]:
        """Sender, receiver, and (value, stage that wants it)."""
        sends, forward = "SEND" in action.kind, action.kind.endswith("F")
        up = sends == forward
        other = action.far if action.far >= 0 else action.stage + (1 if up else -1)
        low, high = min(action.stage, other), max(action.stage, other)
        if (low, high) not in edges(wiring) or (other > action.stage) != up or (action.far >= 0) != (high - low > 1):
            raise Wrong(f"{action} goes along no edge")
        if placement[low] == placement[high] or (not forward and not trains):
            raise Wrong(f"{action} is needless")
        source, target = (action.stage, other) if sends else (other, action.stage)
        return placement[source], placement[target], (("out" if forward else "grad", source, action.microbatch), target)

    def step(rank: int, cell: Action) -> bool:
        """Run a cell; False if it must wait."""
        if "SEND" in cell.kind:
            _, receiver, content = message(cell)
            if content[0] not in here[rank]:
                raise Wrong(f"{cell} sends what is not there")
            channel = channels[rank, receiver]
            if not channel.posted:
                return False
            if channel.posted.pop(0) != content:
                raise Wrong(f"{cell} is received as something else")
            channel.arrived.add(content)
            sent[content] += 1
        elif "RECV" in cell.kind:
            sender, _, content = message(cell)
            channels[sender, rank].posted.append(content)
            received[content] += 1
        else:
            actions = [part for part in cell.parts or (cell,) if part.kind in ("F", *BACKWARDS)]
            for action in actions:
                for value in needs(action, wiring):
                    home = placement[value[1]]
                    if home == rank or not messages:
                        if value not in here[home]:
                            return False
                    elif (value, action.stage) not in channels[home, rank].arrived:
                        return False
            for action in actions:
                here[rank] |= makes(action)
        return True

    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while at[rank] < len(row) and step(rank, row[at[rank]]):
                at[rank] += 1
                moved = True
    if any(reached < len(row) for reached, row in zip(at, schedule.rows, strict=True)):
        raise Wrong("it hangs")
    if any(channel.posted for channel in channels.values()) or sent != received or any(n > 1 for n in sent.values()):
        raise Wrong("sends and receives do not pair")
    if messages:
        for source, target in edges(wiring):
            for microbatch in (number for stage, number in work(wiring, schedule.microbatches) if stage == source):
                if placement[source] != placement[target]:
                    wanted: list[tuple[Value, int]] = [(("out", source, microbatch), target)]
                    wanted += [(("grad", target, microbatch), source)] if trains else []
                    if any(content not in sent for content in wanted):
                        raise Wrong("a message is missing")


def _look_at_weights(schedule: Schedule) -> None:
    reduces = any(cell.kind == "REDUCE_GRAD" for row in schedule.rows for cell in row)
    for stage, rank in schedule.placement.items():
        story = ""
        for cell in schedule.rows[rank]:
            if cell.stage == stage and cell.kind in ("UNSHARD", "RESHARD", "REDUCE_GRAD"):
                story += {"UNSHARD": "(", "RESHARD": ")", "REDUCE_GRAD": "r"}[cell.kind]
            for action in cell.parts or (cell,):
                if action.stage == stage and action.kind in ("F", *BACKWARDS):
                    story += "w" if action.kind in ("B", "W") else "u"
        if "(" in story or ")" in story:
            held = False
            for letter in story:
                if (letter == "(" and held) or (letter in ")uw" and not held):
                    raise Wrong("weights are not there, or there twice")
                held = letter == "(" or (held and letter != ")")
            if held:
                raise Wrong("weights are not dropped")
        if reduces:
            expected = 1 if "w" in story else 0
            if story.count("r") != expected or (expected and "w" in story[story.index("r") :]):
                raise Wrong("gradients are not reduced once, after the last backward")


def any_schedule(random: Random) -> Schedule:
    """A right schedule that only computes: any wiring, any placement, any order that can run, composites among it."""
    length = random.choice((1, 2, 3, 3, 4, 5))
    possible = [(source, target) for source in range(length) for target in range(source + 2, length)]
    wiring = Wiring(
        length,
        copies=random.choice((1, 1, 2)),
        pieces=random.choice((1, 1, 2, 3)),
        skips=tuple(edge for edge in possible if random.random() < 0.3),
    )
    microbatches = random.randint(1, 3) * wiring.pieces
    ranks = random.choice((1, 2, 2, 3, 4))
    placement = {stage: random.randrange(ranks) for stage in range(wiring.stages * wiring.copies)}
    left: list[Action] = []
    trains = random.random() < 0.8
    for stage, microbatch in sorted(work(wiring, microbatches)):
        kinds = [Kind.F]
        if trains:
            kinds += random.choice(([Kind.B], [Kind.I, Kind.W]))
        left += [Action(stage, kind, microbatch) for kind in kinds]
    overlap = random.choice((0, 0.3))
    there: set[Value] = set()
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    while left:
        ready = [action for action in left if needs(action, wiring) <= there]
        parts = [random.choice(ready)]
        rank = placement[parts[0].stage]
        if random.random() < overlap:
            others = [action for action in ready if placement[action.stage] == rank and action not in parts]
            parts += random.sample(others, min(len(others), random.choice((1, 2))))
        rows[rank].append(parts[0] if len(parts) == 1 else Action(-1, Kind.OVERLAP_F_B, -1, tuple(parts)))
        for part in parts:
            there |= makes(part)
            left.remove(part)
    return Schedule(tuple(map(tuple, rows)), placement, wiring, microbatches, "random")


def mutant(schedule: Schedule, random: Random) -> Schedule:
    """The schedule with one mistake: cells dropped, doubled, swapped, shuffled, moved, relabelled, joined, ..."""
    rows = [list(row) for row in schedule.rows]
    rank = random.choice([rank for rank, row in enumerate(rows) if row] or [0])
    row = rows[rank]
    if not row:
        return schedule
    step = random.randrange(len(row))
    match random.choice(
        ("drop", "double", "swap", "shift", "shift", "shuffle", "move", "relabel", "relabel", "insert", "join", "part")
    ):
        case "drop":
            del row[step]
        case "shuffle":
            window = row[step : step + 5]
            random.shuffle(window)
            row[step : step + 5] = window
        case "double":
            row.insert(random.randint(0, len(row)), row[step])
        case "swap":
            other = random.choice((min(step + 1, len(row) - 1), random.randrange(len(row))))
            row[step], row[other] = row[other], row[step]
        case "shift":
            row.insert(random.randint(0, len(row) - 1), row.pop(step))
        case "move":
            cell = row.pop(step)
            target = random.choice(rows)
            target.insert(random.randint(0, len(target)), cell)
        case "relabel":
            row[step] = _relabelled(row[step], schedule, random)
        case "insert":
            kind = random.choice(list(Kind)[:-1])
            whole = kind in ("UNSHARD", "RESHARD", "REDUCE_GRAD")
            cell = Action(random.choice(list(schedule.placement)), kind, -1 if whole else 0)
            row.insert(step, cell if whole else _relabelled(cell, schedule, random))
        case "join":
            both = [part for cell in row[step : step + 2] for part in cell.computes]
            if len(both) > 1:
                row[step : step + 2] = [Action(-1, Kind.OVERLAP_F_B, -1, tuple(both))]
        case "part":
            row[step : step + 1] = row[step].parts or (row[step],)
    return schedule.with_rows(rows)


def _relabelled(cell: Action, schedule: Schedule, random: Random) -> Action:
    if cell.parts:
        parts = list(cell.parts)
        which = random.randrange(len(parts))
        parts[which] = _relabelled(parts[which], schedule, random)
        return cell._replace(parts=tuple(parts))
    match random.choice(("stage", "microbatch", "kind", "far")):
        case "stage":
            return cell._replace(stage=random.randint(0, len(schedule.placement)))
        case "microbatch" if cell.microbatch >= 0:
            return cell._replace(microbatch=random.randint(0, schedule.microbatches))
        case "far" if "_" in cell.kind and cell.microbatch >= 0:
            return cell._replace(far=random.randint(-1, len(schedule.placement)))
        case _:
            alike = [
                kind for kind in Kind if (("_" in kind) == ("_" in cell.kind)) and kind.endswith(("F", "B", "I", "W"))
            ]
            return (
                cell._replace(kind=random.choice([kind for kind in alike if kind != "OVERLAP_F_B"]))
                if (cell.microbatch >= 0)
                else cell
            )
