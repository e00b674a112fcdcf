// Colours of spans. A palette has one for each step and expert; a span's entry is looked up by both.

const PHASE_HUES = [205, 28, 135, 285];
const STEP_HUES = [205, 30, 140, 320, 265, 60, 0, 175, 100, 235];

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function cssColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// [0, 255] each, from hue in degrees, saturation and lightness 0 to 1.
function fromHsl(hue, saturation, lightness) {
  const part = (n) => {
    const k = (n + hue / 30) % 12;
    const range = saturation * Math.min(lightness, 1 - lightness);
    return Math.round(255 * (lightness - range * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return [part(0), part(8), part(4)];
}

function fromHex(text) {
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

function mixed(colour, other, share) {
  return colour.map((value, i) => Math.round(value + (other[i] - value) * share));
}

function css(colour) {
  return `rgb(${colour.join(",")})`;
}

// Neighbours in number are far apart in hue.
function expertHue(expert) {
  return (expert * 137.508) % 360;
}

class Palette {
  constructor(data) {
    this.data = data;
    this.stride = (data.experts.length ? data.experts[data.experts.length - 1] : 0) + 2;
    const { step, expert, count } = data.spans;
    this.entry = new Uint32Array(count);
    for (let i = 0; i < count; ++i) this.entry[i] = step[i] * this.stride + expert[i] + 1;
    this.isWait = Uint8Array.from(data.steps, (one) => (one.awaited ? 1 : 0));
    this.update("expert");
  }

  // colouring: "expert" or "step". Where experts are asked for, steps without one keep their own.
  update(colouring) {
    const dark = isDark();
    this.back = fromHex(cssColour("--back"));
    const size = this.data.steps.length * this.stride;
    [this.red, this.green, this.blue] = [0, 1, 2].map(() => new Float32Array(size));
    this.data.steps.forEach((step, index) => {
      for (let expert = -1; expert < this.stride - 1; ++expert) {
        const colour = this.colourOf(step, index, expert, colouring === "step", dark);
        const entry = index * this.stride + expert + 1;
        [this.red[entry], this.green[entry], this.blue[entry]] = colour;
      }
    });
  }

  colourOf(step, index, expert, byStep, dark) {
    if (step.awaited && byStep) {
      return mixed(fromHsl(STEP_HUES[index % STEP_HUES.length], 0.6, 0.5), this.back, 0.3);
    }
    if (step.awaited) return mixed(this.back, dark ? [190, 200, 215] : [70, 80, 95], dark ? 0.38 : 0.42);
    const isSecond = step.phase === "Linear2";
    if (byStep) {
      return fromHsl(STEP_HUES[index % STEP_HUES.length], isSecond ? 0.45 : 0.6, dark ? 0.56 : 0.5);
    }
    if (expert < 0) {
      return fromHsl(PHASE_HUES[step.phaseIndex] ?? 0, step.phase ? 0.28 : 0.04, dark ? 0.5 : 0.58);
    }
    // Linear2 is paler than Linear1, loads and epilogues than products.
    const full = fromHsl(expertHue(expert), isSecond ? 0.5 : 0.72, (dark ? 0.5 : 0.44) + (isSecond ? 0.14 : 0));
    const share = step.name.startsWith("load") ? 0.45 : step.name.endsWith("epilogue") ? 0.25 : 0;
    return mixed(full, step.name.endsWith("epilogue") ? [255, 255, 255] : this.back, share);
  }

  colour(step, expert) {
    const entry = step * this.stride + expert + 1;
    return [this.red[entry], this.green[entry], this.blue[entry]].map(Math.round);
  }
}
