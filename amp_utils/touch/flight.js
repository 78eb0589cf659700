// The flight of a loss scale: draw the staircase that you expect, then let the scaler fly.

// {scale, inf, weight} of each step, as under torch.amp.GradScaler on the CPU: in float32, where a
// new scale is a product in float64, rounded once. bad[i]: batch i is infinite. Above the ceiling
// every step overflows. The weight starts at 2, its gradient is 1, and SGD's learning rate 1/128.
function fly({scale, growth = 2, backoff = 0.5, interval, ceiling}, bad) {
  let now = Math.fround(scale), good = 0, weight = 2;
  return bad.map(infinite => {
    const inf = infinite || now > ceiling;
    const gradient = Math.fround(now * Math.fround(1 / now));
    if (!inf) weight = Math.fround(weight - gradient / 128);
    const row = {scale: now, inf, weight};
    good = inf ? 0 : good + 1;
    const next = Math.fround(now * (inf ? backoff : good === interval ? growth : 1));
    if (good === interval) good = 0;
    if (Number.isFinite(next)) now = next;
    return row;
  });
}

const ZERO = -150; // stands for a scale of 0 on the axis of exponents, below float32's least
const exponent = scale => (scale ? Math.log2(scale) : ZERO);
const name = e => (e === ZERO ? "0" : power(e));

// What is to be said of a flight, and of a drawing (exponents) beside it.
function verdict(rows, drawn) {
  const skipped = rows.filter(row => row.inf).length;
  const broken = rows.findIndex(row => !Number.isFinite(row.weight));
  const same = rows.map((row, i) => exponent(row.scale) === drawn[i]);
  const agree = same.filter(Boolean).length, first = same.indexOf(false) + 1;
  const dead = broken >= 0 && `It died: at step ${broken + 1} the scale was ` +
    `${name(exponent(rows[broken].scale))}, and the weight became ` +
    `${Number.isNaN(rows[broken].weight) ? "NaN" : "-inf"}.`;
  return [
    `The scaler (blue) skipped ${skipped} of ${rows.length} steps.`,
    `Its last scale is ${name(exponent(rows.at(-1).scale))}.`,
    dead || (skipped === rows.length && "It made no step: nothing was learned."),
    agree === rows.length ? "Yours (thick line) is the same in every step."
      : `Yours (thick line) agrees in ${agree} steps and first differs at step ${first}.`,
  ].filter(Boolean).join(" ");
}

function figure(stage, {init, interval, ceiling, steps, bad}) {
  const state = {init, interval, ceiling, every: 0, at: 1, flown: false};
  const drawn = Array(steps).fill(init), marked = drawn.map((_, i) => i + 1 === bad);
  const infinite = () =>
    marked.map((is, i) => is || (state.every > 0 && (i + 1) % state.every === 0));
  const change = key => value => { state[key] = value; stage.redraw(); };

  // The cursor is a step. What is drawn there holds to the end: later steps are drawn later.
  const stepAt = () => slider("step", {min: 1, max: steps, value: state.at}, String, move);
  const scaleAt = () => slider("your scale from here",
    {min: ZERO, max: 60, value: drawn[state.at - 1]}, name, put);
  const cursor = {step: stepAt(), scale: scaleAt()};
  function follow(part, fresh) {
    cursor[part].replaceWith(fresh);
    cursor[part] = fresh;
  }
  function move(step) {
    state.at = step;
    follow("scale", scaleAt());
    stage.redraw();
  }
  function put(e) {
    drawn.fill(e, state.at - 1);
    stage.redraw();
  }
  function mark() {
    marked[state.at - 1] = !marked[state.at - 1];
    stage.redraw();
  }

  const bomb = button("infinite batch here", mark);
  const go = button("Fly", () => change("flown")(!state.flown));
  stage.controls.append(
    slider("init_scale", {min: -60, max: 60, value: init}, name, e => {
      if (new Set(drawn).size === 1) drawn.fill(e);
      follow("scale", scaleAt());
      change("init")(e);
    }),
    slider("growth_interval", {min: 1, max: 40, value: interval}, String, change("interval")),
    slider("ceiling", {min: -60, max: 60, value: ceiling}, name, change("ceiling")),
    slider("infinite batches", {min: 0, max: 40, value: 0},
      n => (n ? (n > 1 ? `and 1 in ${n}` : "all") : "as marked"), change("every")),
    cursor.step, cursor.scale, make("div", {class: "controls", style: "flex-basis:100%"}, bomb, go));

  // A pointer draws in the plane, and marks batches beneath it.
  let place = null;
  function point(event, down) {
    const box = stage.picture.getBoundingClientRect();
    const {step, e, below} = place(event.clientX - box.left, event.clientY - box.top);
    state.at = step;
    if (!below) put(e);
    else if (down) mark();
    follow("step", stepAt());
    move(step);
  }
  stage.picture.style = "touch-action: pan-y; cursor: crosshair";
  stage.picture.addEventListener("pointerdown", event => {
    stage.picture.setPointerCapture(event.pointerId);
    point(event, true);
  });
  stage.picture.addEventListener("pointermove", event => event.buttons && point(event, false));

  return width => {
    const bads = infinite(), rows = fly(
      {scale: 2 ** state.init, interval: state.interval, ceiling: 2 ** state.ceiling}, bads);
    const truth = rows.map(row => exponent(row.scale));
    const shown = [state.init, state.ceiling, ...drawn, ...(state.flown ? truth : [])];
    const low = Math.min(...shown) - 5, high = Math.max(...shown) + 5;
    const left = 38, height = 230, column = (width - left) / steps;
    const x = i => left + i * column, y = e => (high - e) / (high - low) * height;
    place = (px, py) => ({
      step: Math.min(Math.max(Math.ceil((px - left) / column), 1), steps),
      e: Math.min(Math.max(Math.round(high - py / height * (high - low)), ZERO), 60),
      below: py > height,
    });
    const stairs = (es, style) => make("path", {style: "fill:none;" + style,
      d: es.map((e, i) => `${i ? "V" : `M${left} `}${y(e)}H${x(i + 1)}`).join("")});
    const across = (e, style) =>
      make("line", {x1: left, x2: width, y1: y(e), y2: y(e), style: "stroke:" + style});
    const text = (px, py, end, words, look) =>
      make("text", {x: px, y: py, "text-anchor": end ? "end" : "start", class: look}, words);
    const limit = (e, words) => (e > low && e < high ? [
      across(e, "var(--red);stroke-dasharray:5 4"), text(left + 4, y(e) - 6, false, words, "")] : []);

    const gap = [2, 4, 8, 16, 32, 64].find(size => (high - low) / size < 8), axis = [];
    for (let e = Math.ceil(low / gap) * gap; e < high; e += gap) {
      axis.push(across(e, "var(--line)"), text(left - 5, y(e) + 4, true, name(e), "quiet"));
    }
    const marks = bads.flatMap((bad, i) => (bad ? [make("rect", {x: x(i), y: height + 6, height: 12,
      width: Math.max(column - .6, 1.4), style: "fill:var(--red)"})] : []));
    const crosses = rows.flatMap((row, i) => (row.inf && state.flown ? [make("path", {
      d: `M${x(i + .5) - 3} ${y(truth[i]) - 3}l6 6m0 -6l-6 6`,
      style: "stroke:var(--red);stroke-width:1.5"})] : []));
    const middle = x(state.at - .5);
    stage.picture.replaceChildren(make("svg", {width, height: height + 42, "aria-hidden": "true"},
      ...axis, ...limit(state.ceiling, width < 500 ? "ceiling" : "ceiling: above it, gradients overflow"),
      ...limit(-127, "below, 1 ÷ scale is inf"),
      stairs(drawn, "stroke:var(--orange);stroke-width:4;stroke-opacity:.8"),
      ...(state.flown ? [stairs(truth, "stroke:var(--blue);stroke-width:2"), ...crosses] : []),
      make("rect", {x: left, y: height + 6, width: width - left, height: 12,
        style: "fill:none;stroke:var(--line)"}),
      ...marks, make("path", {d: `M${middle} ${height + 19}l4 7h-8z`, style: "fill:var(--ink)"}),
      text(left - 5, height + 16, true, "inf", "quiet"),
      text(left, height + 40, false, "step 1", "quiet"),
      text(width, height + 40, true, `step ${steps}`, "quiet")));
    bomb.setAttribute("aria-pressed", marked[state.at - 1]);
    go.setAttribute("aria-pressed", state.flown);
    stage.say(state.flown ? verdict(rows, drawn)
      : `Your staircase (the thick line) begins at ${name(drawn[0])} and ends at ${name(drawn.at(-1))}. ` +
        "Draw it with the pointer or the last two sliders, then press Fly.");
  };
}
