// Puts the page together, and answers the mouse, the fingers and the keys.

async function main() {
  const page = await readPage();
  const looks = new Looks(page.palette);
  const canvas = document.getElementById("canvas"), tip = document.getElementById("tip");
  const selection = document.getElementById("selection");
  let due = false, said;
  const view = new View(page.longest, () => {
    if (!due) requestAnimationFrame(draw);
    due = true;
  });
  const painter = new Painter(canvas, page, view, looks);
  const choose = (chosen) => {
    view.select(chosen);
    if (chosen) reveal(chosen);
  };
  const words = new Words(page, choose);

  function draw() {
    due = false;
    painter.paint();
    for (const name of SHOWN) document.getElementById(name).setAttribute("aria-pressed", view.show[name]);
    if (said !== view.selected) {
      said = view.selected;
      selection.replaceChildren(...(said ? words.long(said) : [element("p", "Point at an action, or click one, or an idle stretch.")]));
    }
    document.body.dataset.drawn = String(Number(document.body.dataset.drawn ?? 0) + 1);
  }

  function reveal({ timeline, event, idle }) {
    if (idle === undefined) view.reveal(timeline.start[event], timeline.end[event]);
    else view.reveal(timeline.idle_start[idle], timeline.idle_end[idle]);
    const rank = idle === undefined ? timeline.rank(event) : timeline.rankOfIdle(idle);
    const row = timeline.rows[rank], room = painter.height - AXIS;
    if (row.y < view.top) view.top = row.y;
    else if (row.y + row.size > view.top + room) view.top = row.y + row.size - room;
  }

  if (!page.timelines.some(({ lanes }) => lanes.some((each) => each.length > 1))) {
    document.getElementById("messages").hidden = true;
  }
  document.getElementById("legend").append(...words.legend(looks));
  document.getElementById("figures").append(words.figures());
  document.getElementById("ranks").append(...words.ranks());
  for (const name of SHOWN) document.getElementById(name).addEventListener("click", () => view.toggle(name));
  document.getElementById("in").addEventListener("click", () => view.zoom(1 / 1.6));
  document.getElementById("out").addEventListener("click", () => view.zoom(1.6));
  document.getElementById("fit").addEventListener("click", () => view.fit());
  document.getElementById("help").addEventListener("click", toggleKeys);

  function toggleKeys() {
    const keys = document.getElementById("keys");
    keys.hidden = !keys.hidden;
    document.getElementById("help").setAttribute("aria-pressed", !keys.hidden);
  }

  // pointers

  const held = new Map();
  let moved = 0;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };

  function point(at) {
    const found = at && painter.at(at.x, at.y);
    painter.hovered = found && "size" in found ? null : found;
    tip.hidden = !found;
    if (found) {
      tip.textContent = words.short(found);
      const room = canvas.getBoundingClientRect();
      const left = at.x + 16 + tip.offsetWidth > room.width ? at.x - tip.offsetWidth - 12 : at.x + 16;
      const top = at.y + 16 + tip.offsetHeight > room.height ? at.y - tip.offsetHeight - 12 : at.y + 16;
      tip.style.left = `${Math.max(left, 0)}px`;
      tip.style.top = `${Math.max(top, 0)}px`;
    }
    view.changed();
  }

  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    held.set(event.pointerId, place(event));
    if (held.size === 1) moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const at = place(event), before = held.get(event.pointerId);
    if (!before) {
      point(at);
      return;
    }
    const spread = () => {
      const [one, other] = [...held.values()];
      return other ? Math.max(Math.abs(one.x - other.x), 20) : 1;
    };
    const was = spread();
    held.set(event.pointerId, at);
    const share = painter.width - GUTTER;
    moved += Math.abs(at.x - before.x) + Math.abs(at.y - before.y);
    if (moved < 4) return;
    canvas.classList.add("dragging");
    point(null);
    view.top -= at.y - before.y;
    view.pan(-(at.x - before.x) / held.size / share);
    if (held.size === 2) view.zoom(was / spread(), painter.time(at.x));
  });
  canvas.addEventListener("pointerup", (event) => {
    held.delete(event.pointerId);
    canvas.classList.remove("dragging");
    const found = moved < 4 && painter.at(place(event).x, place(event).y);
    if (moved < 4) view.select(found && !("size" in found) ? found : null);
  });
  canvas.addEventListener("pointercancel", (event) => held.delete(event.pointerId));
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1;
    const { x } = place(event);
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      view.pan(((event.deltaX || event.deltaY) * unit) / (painter.width - GUTTER));
    } else if (x < GUTTER) {
      view.top += event.deltaY * unit;
      view.change();
    } else {
      view.zoom(Math.exp(Math.min(Math.max(event.deltaY * unit, -200), 200) * (event.ctrlKey ? 0.01 : 0.0018)), painter.time(x));
    }
    point(place(event));
  }, { passive: false });

  // keys

  // The actions and idle stretches of a rank, in time.
  function along(timeline, rank) {
    const events = [...timeline.lanes[rank][0].events].map((event) => ({ timeline, event }));
    const idles = timeline.idles(rank).map((idle) => ({ timeline, idle }));
    return [...events, ...idles].sort((one, other) => begin(one) - begin(other));
  }
  const begin = ({ timeline, event, idle }) => (idle === undefined ? timeline.start[event] : timeline.idle_start[idle]);
  const same = (one, other) => one.timeline === other.timeline && one.event === other.event && one.idle === other.idle;
  const rankOf = ({ timeline, event, idle }) => (idle === undefined ? timeline.rank(event) : timeline.rankOfIdle(idle));

  function step(by) {
    const from = view.selected ?? { timeline: page.timelines[0], event: -1 };
    const row = along(from.timeline, view.selected ? rankOf(from) : 0);
    const at = row.findIndex((each) => same(each, from));
    const next = row[Math.min(Math.max(at + by, 0), row.length - 1)];
    if (next) choose(next);
  }

  function cross(by) {
    if (!view.selected) {
      step(1);
      return;
    }
    const at = painter.rows.indexOf(view.selected.timeline.rows[rankOf(view.selected)]);
    const row = painter.rows[at + by];
    if (!row) return;
    const time = begin(view.selected), there = along(row.timeline, row.rank);
    const found = there.findLast((each) => begin(each) <= time) ?? there[0];
    if (found) choose(found);
  }

  let longest = null, next = 0;
  function nextIdle() {
    longest ??= page.timelines
      .flatMap((timeline) => [...timeline.idle_start.keys()].map((idle) => ({ timeline, idle })))
      .sort((one, other) => length(other) - length(one));
    if (longest.length) choose(longest[next++ % longest.length]);
  }
  const length = ({ timeline, idle }) => timeline.idle_end[idle] - timeline.idle_start[idle];

  const KEYS = {
    ArrowLeft: () => view.pan(-0.15), ArrowRight: () => view.pan(0.15),
    ArrowUp: () => scroll(-60), ArrowDown: () => scroll(60),
    "+": () => view.zoom(1 / 1.6), "=": () => view.zoom(1 / 1.6), "-": () => view.zoom(1.6),
    0: () => view.fit(), Home: () => view.fit(),
    n: () => step(1), p: () => step(-1), j: () => cross(1), k: () => cross(-1), i: nextIdle,
    c: () => view.toggle("critical"), s: () => view.toggle("messages"), m: () => view.toggle("memory"),
    "?": toggleKeys, Escape: () => view.select(null),
  };
  function scroll(by) {
    view.top += by;
    view.change();
  }
  document.addEventListener("keydown", (event) => {
    const aside = event.target.closest?.("aside");
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
    if (aside && event.key.startsWith("Arrow")) return;
    event.preventDefault();
    KEYS[event.key]();
  });

  addEventListener("hashchange", () => view.read(page.timelines));
  looks.dark.addEventListener("change", () => view.changed());
  new ResizeObserver(() => view.changed()).observe(canvas);
  document.title = page.title;
  view.read(page.timelines);
  view.changed();
  return { page, view, painter, words };
}

const ready = main();
ready.catch((error) => {
  document.getElementById("selection").replaceChildren(element("p", `This page cannot be shown: ${error.message}`));
});
