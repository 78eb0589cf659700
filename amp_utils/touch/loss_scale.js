// The figure of lesson 5: gradients on the axis of fp16's numbers, moved by the loss scale 2^k.

const COLORS = {lost: "--red", subnormal: "--orange", normal: "--blue", infinite: "--red"};

// What fp16 makes of most numbers from 2^e to 2^(e+1).
function zone(e) {
  return e < -25 ? "lost" : e < -14 ? "subnormal" : e < 16 ? "normal" : "infinite";
}

// How many gradients fp16 makes zero, subnormal, normal, infinite at the loss scale 2^k. A bin is
// [e, how many lie in [2^e, 2^(e+1)), how many of them are 2^e itself, at least (2 - 2^-10) 2^e,
// at least (2 - 2^-11) 2^e]: at fp16's borders these round to the other side.
function fates(bins, k) {
  const fate = {lost: 0, subnormal: 0, normal: 0, infinite: 0};
  for (const [e, count, powers, nearly, top] of bins) {
    const at = e + k, across = {[-25]: [powers, "lost"], [-15]: [nearly, "normal"], 15: [top, "infinite"]};
    const [some, other] = across[at] ?? [0, zone(at)];
    fate[other] += some;
    fate[zone(at)] += count - some;
  }
  return fate;
}

// A share in words that never calls some of them none, or nearly all of them all.
function share(count, total) {
  const percent = 100 * count / total;
  if (count === 0 || count === total) return `${percent}%`;
  return percent < 0.1 ? "< 0.1%" : percent > 99.9 ? "> 99.9%" : `${percent.toFixed(1)}%`;
}

// The network whose scale lies nearest to 2^k: [its exponent, its picture].
function nearest(learned, k) {
  return learned.reduce((best, one) => Math.abs(one[0] - k) < Math.abs(best[0] - k) ? one : best);
}

function sentence(bins, total, k) {
  const {lost, subnormal, infinite} = fates(bins, k);
  const says = (count, words) => `${count.toLocaleString("en")} (${share(count, total)}) ${words}`;
  return `Loss scale ${power(k)}: of ${total.toLocaleString("en")} gradients fp16 makes `
    + `${says(lost, "zero")}, ${says(subnormal, "subnormal")} and ${says(infinite, "infinite")}.`;
}

// A picture of n × n pixels; each digit of the text is one of 16 greys.
function thumbnail(picture, size, label) {
  const n = picture ? Math.sqrt(picture.length) : 16, paths = {};
  [...picture ?? ""].forEach((grey, i) => {
    paths[grey] = (paths[grey] ?? "") + `M${i % n} ${Math.floor(i / n) + 0.5}h1`;
  });
  const drawn = Object.entries(paths).map(([grey, d]) => make("path", {d, stroke: `#${grey.repeat(3)}`}));
  if (!picture) {
    drawn.push(make("rect", {x: 0.1, y: 0.1, width: 15.8, height: 15.8, fill: "none", stroke: "var(--red)", "stroke-width": 0.2}));
    drawn.push(make("text", {x: 8, y: 9.2, "text-anchor": "middle", style: "font-size: 3.5px"}, "NaN"));
  }
  return make("svg", {viewBox: `0 0 ${n} ${n}`, width: size, height: size, role: "img", "aria-label": label, "shape-rendering": "crispEdges"}, ...drawn);
}

function figure(stage, {bins, learned, total}) {
  const [low, high] = [Math.min(bins[0][0] - 2, -40), 22], most = Math.max(...bins.map(bin => bin[1]));
  const state = {k: 0};
  const scale = {min: 0, max: Math.max(1, 20 - bins.at(-1)[0]), value: 0};
  const words = k => k < 25 ? `${power(k)} = ${(2 ** k).toLocaleString("en")}` : power(k);
  stage.controls.append(slider("loss scale", scale, words, k => { state.k = k; stage.redraw(); }));

  return function draw(width) {
    const {k} = state, fate = fates(bins, k);
    const side = learned.length && width > 560 ? 150 : 0; // the picture stands beside, or below
    const wide = width - side, unit = wide / (high - low), [top, bottom] = [46, 200];
    const x = e => unit * (e - low);
    const parts = [];
    const edges = [low, -25, -14, 16, high];
    Object.entries(fate).forEach(([name, count], i) => {
      const last = name === "infinite", middle = (x(edges[i]) + x(edges[i + 1])) / 2;
      const place = {x: last ? wide : middle, "text-anchor": last ? "end" : "middle"};
      parts.push(make("text", {...place, y: 14, class: "quiet"}, name === "lost" ? "becomes 0" : name));
      parts.push(make("text", {...place, y: 32, class: "strong"}, share(count, total)));
      if (!last) parts.push(make("line", {x1: x(edges[i + 1]), x2: x(edges[i + 1]), y1: top - 6, y2: bottom + 4, stroke: "var(--quiet)", "stroke-dasharray": "3 3"}));
    });
    for (const [e, count] of bins) {
      const height = Math.max(1.5, (bottom - top) * count / most);
      parts.push(make("rect", {x: x(e + k) + 0.5, y: bottom - height, width: unit - 1, height, fill: `var(${COLORS[zone(e + k)]})`}));
    }
    parts.push(make("line", {x1: 0, x2: wide, y1: bottom, y2: bottom, stroke: "var(--ink)"}));
    for (let e = 16; e > low; e -= 8) {
      parts.push(make("text", {x: x(e), y: bottom + 18, "text-anchor": "middle", class: "quiet"}, power(e)));
    }
    const histogram = make("svg", {viewBox: `0 0 ${wide} 226`, width: wide, height: 226, "aria-hidden": "true"}, ...parts);
    const all = [histogram];
    if (learned.length) {
      const [trained, picture] = nearest(learned, k);
      const label = picture ? `learned at ${power(trained)}` : `dead at ${power(trained)}`;
      all.push(make("div", {style: "text-align: center; width: 120px; flex: none"}, thumbnail(picture, 120, label), label));
    }
    stage.picture.replaceChildren(make("div", {style: "display: flex; flex-wrap: wrap; gap: 12px; align-items: center"}, ...all));
    stage.say(sentence(bins, total, k));
  };
}
