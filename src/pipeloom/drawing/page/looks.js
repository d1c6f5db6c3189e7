// Colours and textures of the kinds of action; the same as in the other pictures.

class Looks {
  constructor(palette) {
    this.palette = palette;
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.made = new Map();
  }

  get theme() {
    return this.dark.matches ? this.palette.dark : this.palette.light;
  }

  // The fill of a kind in a shade from 0 to 1, plain and with its texture, and the writing on it.
  of(kind, shade) {
    const name = `${kind} ${shade}`;
    let look = this.made.get(name);
    if (!look) {
      const [first, last] = this.palette.fills[kind].map(channels);
      const mixed = first.map((value, at) => Math.round(value + shade * (last[at] - value)));
      const ink = luminance(mixed) > 0.179 ? this.palette.inks[0] : this.palette.inks[1];
      // the colour as a number, as pixels are stored
      const pixel = ((mixed[2] << 16) | (mixed[1] << 8) | mixed[0]) >>> 0;
      look = { color: `rgb(${mixed})`, pixel, ink, texture: texture(this.palette.textures[kind], `rgb(${mixed})`, ink) };
      this.made.set(name, look);
    }
    return look;
  }

  // A swatch for the legend.
  swatch(kind, shade) {
    return swatch((context) => {
      context.fillStyle = this.of(kind, shade).texture;
      context.fillRect(0, 0, 20, 12);
    });
  }

  // One of the thin bars that messages are.
  lanes() {
    return swatch((context) => ["F", "B"].forEach((kind, at) => {
      context.fillStyle = this.of(kind, 0).color;
      context.fillRect(0, 1 + 6 * at, 20, 4);
    }));
  }
}

function swatch(paint) {
  const canvas = document.createElement("canvas");
  canvas.width = 40;
  canvas.height = 24;
  canvas.style.cssText = "width:20px;height:12px";
  const context = canvas.getContext("2d");
  context.scale(2, 2);
  paint(context);
  return canvas;
}

function channels(color) {
  return [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
}

function luminance(color) {
  const [red, green, blue] = color.map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function texture(name, color, ink) {
  if (!name) return color;
  const size = 6, scale = 2;
  const tile = document.createElement("canvas");
  tile.width = tile.height = size * scale;
  const context = tile.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = color;
  context.fillRect(0, 0, size, size);
  context.strokeStyle = context.fillStyle = ink;
  if (name === "dotted") {
    context.globalAlpha = 0.42;
    for (const at of [1.5, 4.5]) {
      context.beginPath();
      context.arc(at, at, 0.6, 0, 7);
      context.fill();
    }
  } else {
    context.globalAlpha = 0.3;
    context.lineWidth = 0.8;
    context.beginPath();
    for (const shift of [-size, 0, size]) {
      const rising = name === "rising";
      context.moveTo(shift, rising ? size : 0);
      context.lineTo(shift + size, rising ? 0 : size);
    }
    context.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}
