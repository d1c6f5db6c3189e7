// What is drawn over the rows: what is chosen or pointed at, with all that it hangs together with; the critical path.

class Marks {
  constructor(painter) {
    this.painter = painter;
  }

  outline({ left, right, top, height }, color, line) {
    const { painter } = this, { context } = painter;
    const from = Math.max(left, -10), until = Math.min(right, painter.width + 10);
    if (until < from) return;
    context.strokeStyle = color;
    context.lineWidth = line;
    context.strokeRect(from, top, until - from, height);
  }

  // A line from the end of one event to the start of another.
  connect(from, to, color) {
    const { painter } = this, { context } = painter;
    context.strokeStyle = color;
    context.lineWidth = 1.5;
    const x0 = from.right, x1 = Math.max(to.left, Math.min(to.right, x0)), bend = Math.max((x1 - x0) / 2, 8);
    const y0 = from.top + from.height / 2, y1 = to.top + to.height / 2;
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
    context.stroke();
  }

  chosen({ timeline, event, idle }, theme, line) {
    const { painter } = this;
    if (idle !== undefined) {
      const { y, row } = timeline.rows[timeline.rankOfIdle(idle)];
      const box = { left: painter.x(timeline.idle_start[idle]), right: painter.x(timeline.idle_end[idle]), top: painter.y(y), height: row };
      this.outline(box, theme.path, line);
      if (line < 2) return;
      for (const cause of timeline.why(idle).slice(0, 200)) {
        const there = painter.box(timeline, cause.event);
        if (there) this.outline(there, theme.path, 2);
      }
      return;
    }
    const box = painter.box(timeline, event);
    if (!box) return;
    for (const [others, towards] of [[timeline.inputsOf(event), true], [timeline.outputsOf(event), false]]) {
      for (const other of others) {
        const there = painter.box(timeline, other);
        if (!there) continue;
        this.outline(there, theme.ink, 1.5);
        this.connect(...(towards ? [there, box] : [box, there]), towards ? theme.path : theme.ink);
      }
    }
    this.outline(box, theme.path, line);
  }

  critical(timeline, theme) {
    const { painter } = this, { context } = painter;
    context.strokeStyle = theme.path;
    context.lineWidth = 2;
    context.beginPath();
    let drawn = -Infinity, before = null;
    for (const event of timeline.critical) {
      if (timeline.end[event] < painter.view.left || timeline.start[event] > painter.view.right) {
        before = null;
        continue;
      }
      const box = painter.box(timeline, event);
      if (!box) continue;
      const y = box.top + box.height - 2.5;
      if (before === null) context.moveTo(box.left, y);
      else if (box.right - drawn > 0.5 || y !== before) context.lineTo(box.left, y);
      context.lineTo(box.right, y);
      drawn = box.right;
      before = y;
    }
    context.stroke();
  }
}
