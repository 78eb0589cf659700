// A model's ops under autocast: which dtype leaves each of them, and how many casts it takes.

// {low, casts} of each box. where: device and dtype, such as "cpubf16"; off: the boxes with
// autocast switched off, whose inputs are widened to float32. The table is measured, see flow.py.
function propagate({boxes, table}, where, off) {
  const results = [];
  for (const [i, {kind, from}] of boxes.entries()) {
    const given = from.map(source => (source >= 0 && results[source].low ? "l" : "f")).join("");
    const [dtype, casts] = table[kind][where][off.includes(i) ? "off" : given];
    results.push({low: dtype === "l", casts: Number(casts)});
  }
  return results;
}

// What is to be said: of the guesses (true is low, null is none), or of a block that is all shown.
function verdict(results, everywhere, guesses, shown, off) {
  const casts = results.reduce((sum, result) => sum + result.casts, 0);
  const changed = results.filter((result, i) => result.low !== everywhere[i].low).length;
  const made = guesses.filter(guess => guess !== null).length;
  const right = guesses.filter((guess, i) => guess === results[i].low).length;
  if (!shown) {
    return made ? `${right} of ${made} guesses are right.`
      : "Guess the dtype of each result, from top to bottom.";
  }
  return `Autocast inserts ${casts} casts. ` + (off.length
    ? `With enabled=False in ${off.length} of ${results.length} boxes, ` +
      `${changed} result${changed === 1 ? "" : "s"} changed dtype.`
    : "Switch boxes off and see which results change.");
}

function figure(stage, data) {
  const {boxes} = data, row = 34, gutter = 44;
  const state = {device: "cpu", dtype: "bf16", shown: false};
  let off = [], guesses = boxes.map(() => null);
  const change = key => value => { state[key] = value; stage.redraw(); };

  const all = button("Show all", () => {
    if (state.shown) guesses = guesses.map(() => null);
    change("shown")(!state.shown);
  });
  stage.controls.append(
    all, choice("device", {cpu: "CPU", cuda: "CUDA"}, state.device, change("device")),
    choice("dtype", {bf16: "bf16", fp16: "fp16"}, state.dtype, change("dtype")));

  const kinds = boxes.map(({label, op}) => make("span", {style: "color:var(--quiet)"},
    op === label ? "" : ` ${op}`));
  const rows = boxes.map(({label}, i) => {
    const look = {style: "min-width:3.4rem;padding:0 .3rem"};
    const guess = low => button("", () => {
      guesses[i] = low;
      stage.redraw();
    }, look);
    const parts = {wide: guess(false), narrow: guess(true), casts: make("span", {
      style: "min-width:3.6rem;color:var(--quiet)"})};
    parts.off = button("off", () => {
      off = off.includes(i) ? off.filter(j => j !== i) : [...off, i];
      stage.redraw();
    }, {...look, "aria-label": `off: enabled=False for ${label}`,
      style: "min-width:2.6rem;margin-left:.8rem;padding:0 .3rem"});
    parts.line = make("div", {role: "group", "aria-label": `${i + 1}: ${label}`,
      style: `display:flex;gap:5px;align-items:center;height:${row}px`},
    make("span", {style: "flex:1;white-space:nowrap"}, label, kinds[i]), parts.wide, parts.narrow, parts.casts, parts.off);
    return parts;
  });
  const edges = make("svg", {width: gutter, height: row * boxes.length, "aria-hidden": "true",
    style: "position:absolute;left:0;top:0"});
  stage.picture.style = `position:relative;padding-left:${gutter}px;max-width:34rem`;
  stage.picture.append(edges, ...rows.map(parts => parts.line));

  const colour = low => (low ? (state.dtype === "bf16" ? "blue" : "red-text") : "ink");
  const y = i => row * (i + .5), x = gutter - 8;
  function draw(results, known) {
    const lines = boxes.flatMap(({from}, i) => from.filter(source => source >= 0).map(source => {
      const bend = i - source > 1 ? x - Math.min(x, 9 + 5 * (i - source)) : x;
      return make("path", {d: `M${x} ${y(source)}C${bend} ${y(source)} ${bend} ${y(i)} ${x} ${y(i)}`,
        style: "fill:none;" + (known[source] ? `stroke-width:2.5;stroke:var(--${
          colour(results[source].low)})` : "stroke:var(--quiet);stroke-dasharray:2 4")});
    }));
    const dots = boxes.map((_, i) => make("circle", {cx: x, cy: y(i), r: 5, style:
      `stroke:var(--quiet);fill:var(--${known[i] ? colour(results[i].low) : "paper"})`}));
    edges.replaceChildren(...lines, ...dots);
  }

  return width => {
    for (const part of [...kinds, ...rows.map(parts => parts.casts)]) part.hidden = width < 400;
    const where = state.device + state.dtype, results = propagate(data, where, off);
    const known = guesses.map(guess => state.shown || guess !== null);
    draw(results, known);
    for (const [i, parts] of rows.entries()) {
      const {low, casts} = results[i];
      for (const [side, key, words] of [[false, parts.wide, "fp32"], [true, parts.narrow, state.dtype]]) {
        const truth = known[i] && low === side, missed = guesses[i] === side && low !== side;
        key.textContent = words + (guesses[i] === side ? (missed ? " ✗" : " ✓") : "");
        key.setAttribute("aria-label", `${boxes[i].label} returns ${key.textContent}`);
        key.setAttribute("aria-pressed", truth);
        key.style.background = truth ? `var(--${colour(side)})` : "";
      }
      parts.off.setAttribute("aria-pressed", off.includes(i));
      parts.casts.textContent = known[i] && casts ? `${casts} cast${casts > 1 ? "s" : ""}` : "";
    }
    all.setAttribute("aria-pressed", state.shown);
    stage.say(verdict(results, propagate(data, where, []), guesses, state.shown, off));
  };
}
