// The figure of lesson 15: amp_utils.blocks in JavaScript, on one vector whose outlier grows.

const SCALES = {none: "none", fp32: "float32", e8m0: "power of two, up", e8m0_floor: "power of two, OCP", e4m3: "fp8 e4m3"};
const E4M3 = {name: "e4m3fn", e: 4, m: 3, finite: true, nan: true};
const greatest = f => decode(f, largest(f));
const smallest = f => decode(f, 1);

function powerOfTwo(exponent) { // within E8M0
  return 2 ** Math.min(127, Math.max(-127, exponent));
}

function exponent(x) { // the power of two at or below x
  view.setFloat64(0, x);
  return ((view.getUint16(0) >> 4) & 2047) - 1023;
}

// The scale of each block, of `size` neighbours, as amp_utils.blocks.scales finds it.
function scales(f, vector, kind, size) {
  const most = [];
  for (let i = 0; i < vector.length; i += size) most.push(Math.max(...vector.slice(i, i + size).map(Math.abs)));
  const wanted = most.map(x => x / greatest(f));
  const unit = Math.fround(Math.max(...wanted) / greatest(E4M3));
  const scale = {
    none: () => 1,
    fp32: x => Math.fround(x),
    e8m0: x => powerOfTwo(exponent(x) + (2 ** exponent(x) < x)),
    e8m0_floor: (x, i) => powerOfTwo(exponent(most[i]) - exponent(greatest(f))),
    e4m3: x => Math.max(round(E4M3, x / unit), smallest(E4M3)) * unit,
  }[kind];
  return wanted.map((x, i) => (x === 0 ? 1 : scale(x, i)));
}

function rounded(f, vector, kind, size) {
  const of = scales(f, vector, kind, size);
  return vector.map((x, i) => {
    const scale = of[Math.floor(i / size)];
    return round(f, x / scale) * scale;
  });
}

// Length of the difference over the length of the vector; infinite where a value is.
function relative(vector, stored) {
  const length = all => Math.sqrt(all.reduce((sum, x) => sum + x * x, 0));
  return length(vector.map((x, i) => x - stored[i])) / length(vector);
}

// Bits of a value with its share of the scale; the one float32 of e4m3 scales is not counted.
function bits(f, kind, size) {
  return 1 + f.e + f.m + ({none: 0, fp32: 32}[kind] ?? 8) / size;
}

function figure(stage, {vector, outlier, formats}) {
  const state = {format: "fp8 e4m3", kind: "fp32", size: vector.length, k: 0};
  const set = key => value => { state[key] = key === "size" ? Number(value) : value; stage.redraw(); };
  const sizes = {[vector.length]: `all ${vector.length}`, 32: "32", 16: "16"};
  stage.controls.append(
    choice("format", Object.fromEntries(formats.map(f => [f.name, f.name])), state.format, set("format")),
    choice("scale", SCALES, state.kind, set("kind")),
    choice("values that share it", sizes, String(state.size), set("size")),
    slider(`element ${outlier} times`, {min: 0, max: 28, value: 0}, power, set("k")));

  return function draw(width) {
    const {kind, size, k} = state, f = formats.find(one => one.name === state.format);
    const given = vector.map((x, i) => i === outlier ? x * 2 ** k : x);
    const stored = rounded(f, given, kind, size), of = scales(f, given, kind, size);
    const errors = given.map((x, i) => Math.min(1, Math.abs((stored[i] - x) / x)));
    const color = i => stored[i] === 0 || !Number.isFinite(stored[i]) ? "var(--red)" : "var(--blue)";

    const left = 40, unit = (width - left) / vector.length, [above, middle, below] = [20, 210, 310];
    const magnitudes = vector.map(x => Math.log2(Math.abs(x)));
    const [low, high] = [Math.floor(Math.min(...magnitudes)) - 2, 30];
    const x = i => left + unit * (i + 0.5);
    const y = e => middle - (middle - above) * (Math.min(high, Math.max(low, e)) - low) / (high - low);
    const parts = [make("text", {x: left, y: 12, class: "quiet"}, "each value, and what its block can reach")];
    of.forEach((scale, i) => { // from half of the smallest number to the largest
      const [floor, ceiling] = [Math.log2(smallest(f) * scale) - 1, Math.log2(greatest(f) * scale)];
      parts.push(make("rect", {x: left + unit * size * i + 1, width: unit * size - 2, y: y(ceiling), height: Math.max(0, y(floor) - y(ceiling)), fill: "var(--blue)", opacity: 0.14}));
    });
    for (let e = 0; e <= 24; e += 8) parts.push(make("text", {x: left - 6, y: y(e) + 4, "text-anchor": "end", class: "quiet"}, power(e)));
    given.forEach((value, i) => {
      const radius = Math.min(4, unit / 2.2);
      parts.push(make("circle", {cx: x(i), cy: y(Math.log2(Math.abs(value))), r: radius, fill: color(i)}));
      const height = Math.max(0.7, (below - middle - 34) * errors[i]);
      parts.push(make("rect", {x: x(i) - 0.38 * unit, width: 0.76 * unit, y: below - height, height, fill: color(i)}));
    });
    parts.push(make("text", {x: left, y: middle + 22, class: "quiet"}, "error by element, in % of its value"));
    for (const [share, name] of [[0, "0%"], [1, "100%"]]) parts.push(make("text", {x: left - 6, y: below + 4 - (below - middle - 34) * share, "text-anchor": "end", class: "quiet"}, name));
    parts.push(make("line", {x1: left, x2: width, y1: below, y2: below, stroke: "var(--ink)"}));
    stage.picture.replaceChildren(make("svg", {viewBox: `0 0 ${width} 316`, width, height: 316, "aria-hidden": "true"}, ...parts));

    const zeros = stored.filter(value => value === 0).length, error = 100 * relative(given, stored);
    const wrong = Number.isFinite(error) ? `the norm of the errors is ${error.toPrecision(2)}% of theirs` : "a value becomes infinite";
    stage.say(`${f.name}, ${bits(f, kind, size)} bits a value: of ${vector.length} values ${zeros} become zero, and ${wrong}.`);
  };
}
