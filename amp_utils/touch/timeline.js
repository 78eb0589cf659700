// Four micro-batches, and which of the four calls follow each: the gradient after every one.

const CALLS = ["unscale_", "step", "update", "zero_grad"];

// What torch.amp.GradScaler and SGD do on the CPU to one weight whose loss is the weight, so that
// every micro-batch adds the scale to its gradient. pressed[j][c]: call c follows micro-batch j.
// Returns a row {batch, call, members, grad, scale, error} for each call; nothing runs after an
// error, a key of the messages. members[j]: what micro-batch j has in the gradient.
function run(pressed, init, interval) {
  let scale = Math.fround(init), good = 0, grad = 0, stage = "ready";
  let members = pressed.map(() => 0);
  const does = {
    unscale_() {
      if (stage !== "ready") return stage === "unscaled" ? "unscaled twice" : "unscaled late";
      const inverse = Math.fround(1 / scale);
      grad = Math.fround(grad * inverse);
      members = members.map(member => member * inverse);
      stage = "unscaled";
      return "";
    },
    step() {
      if (stage === "stepped") return "stepped twice";
      if (stage === "ready") does.unscale_();
      stage = "stepped";
      return "";
    },
    update() {
      if (stage === "ready") return "nothing seen";
      [stage, good] = ["ready", good + 1];
      if (good === interval) [scale, good] = [Math.fround(scale * 2), 0];
      return "";
    },
    zero_grad() {
      [grad, members] = [0, members.map(() => 0)];
      return "";
    },
  };
  const rows = [];
  for (const [batch, calls] of pressed.entries()) {
    grad = Math.fround(grad + scale);
    members = members.map((member, j) => (j === batch ? scale : member));
    rows.push({batch, call: "backward", members, grad, scale, error: ""});
    for (const call of CALLS.filter((_, c) => calls[c])) {
      const error = does[call]();
      rows.push({batch, call, members, grad, scale, error});
      if (error) return rows;
    }
  }
  return rows;
}

const short = number => String(Number(number.toPrecision(8)));

// What a next group would find: a gradient that is left, a scaler that waits for update, or neither.
function left(rows) {
  const at = call => rows.findLastIndex(row => row.call === call);
  const found = [
    rows.at(-1).grad && `.grad is still ${short(rows.at(-1).grad)}`,
    Math.max(at("step"), at("unscale_")) > at("update") && "the scaler waits for update",
  ].filter(Boolean);
  return found.length ? `For a next group, ${found.join(" and ")}.` : "All is ready for a next group.";
}

// What is to be said of a run: the error, or what reached the optimizer.
function verdict(rows, messages) {
  const error = rows.at(-1).error, steps = rows.filter(row => row.call === "step" && !row.error);
  const said = steps.map(({batch, members, grad}) => {
    const there = members.filter(Boolean), right = there.every(member => member === 1);
    const sum = `${there.map(short).join(" + ")}${there.length > 1 ? ` = ${short(grad)}` : ""}`;
    return `The step after micro-batch ${batch + 1} gets ${sum}` +
      (right ? ", as it should." : `; right is ${there.length}.`);
  });
  if (error) said.push(`After micro-batch ${rows.at(-1).batch + 1} torch raises ${messages[error]}`);
  else if (!steps.length) said.push(`No step: .grad ends as ${short(rows.at(-1).grad)}.`);
  else said.push(left(rows));
  return said.join(" ");
}

function figure(stage, {init, messages}) {
  const pressed = [0, 1, 2, 3].map(() => CALLS.map(() => false));
  let interval = "2000";
  const cells = {};
  const cell = (call, batch, ...inside) => {
    cells[call + batch] = make("div", {style: "min-height:20px;white-space:nowrap"});
    return make("td", {style: "padding:2px 3px;vertical-align:top"}, ...inside, cells[call + batch]);
  };
  const keys = CALLS.map((call, c) => pressed.map((calls, j) => button(call, () => {
    calls[c] = !calls[c];
    stage.redraw();
  }, {"aria-label": `${call} after micro-batch ${j + 1}`,
    style: "width:100%;max-width:9rem;padding:.1rem 0"})));
  const head = pressed.map((_, j) => make("th", {scope: "col", style: "text-align:left;padding:3px"},
    `backward ${j + 1}`));
  stage.picture.append(make("table", {style: "width:100%;table-layout:fixed;font-size:13px"},
    make("thead", {}, make("tr", {}, ...head)),
    make("tbody", {}, make("tr", {}, ...pressed.map((_, j) => cell("backward", j))),
      ...CALLS.map((call, c) => make("tr", {}, ...keys[c].map((key, j) => cell(call, j, key)))))));
  stage.picture.append(choice("growth_interval", {2000: "2000", 1: "1"}, interval, value => {
    interval = value;
    stage.redraw();
  }));
  stage.controls.append("Press the calls that follow each micro-batch. The bars are what the four " +
    "have in .grad: low ones count 1, high ones the scale.");

  // One bar for each micro-batch in the gradient, and their sum.
  const bars = (members, sum) => [
    make("svg", {width: 26, height: 16, "aria-hidden": "true",
      style: "display:inline-block;vertical-align:-2px;margin-right:4px"},
    ...members.map((member, j) => {
      const height = member > 1 ? 16 : member === 1 ? 8 : member ? 3 : 1;
      const colour = member === 1 ? "blue" : member ? "orange" : "line";
      return make("rect", {x: 7 * j, y: 16 - height, width: 5, height,
        style: `fill:var(--${colour})`});
    })), sum];

  return () => {
    const rows = run(pressed, init, Number(interval)), last = rows.at(-1);
    for (const [c, call] of CALLS.entries()) {
      for (const [j, key] of keys[c].entries()) key.setAttribute("aria-pressed", pressed[j][c]);
    }
    for (const shown of Object.values(cells)) shown.replaceChildren();
    for (const {batch, call, members, grad, scale, error} of rows) {
      const inside = error ? [make("strong", {style: "color:var(--red-text)"}, "error")]
        : call === "update" ? [`scale ${short(scale)}`]
        : call === "zero_grad" ? ["None"] : bars(members, short(grad));
      cells[call + batch].replaceChildren(...inside);
    }
    for (const [j, th] of head.entries()) {
      th.style.textDecoration = j > last.batch ? "line-through" : "";
    }
    stage.say(verdict(rows, messages));
  };
}
