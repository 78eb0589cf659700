// Bits: flip them, type a number, step to the next one, or choose a format.

const STYLE = `
.bits { display: flex; flex-wrap: wrap; gap: .3rem .9rem; }
.bits small { display: block; color: var(--quiet); font-size: 12px; }
.bits button { font: 15px ui-monospace, monospace; width: 26px; height: 34px; padding: 0;
  margin: 0 2px 2px 0; border: 0; border-radius: 3px; }
.bits button { color: var(--ink); background: color-mix(in srgb, var(--field) 25%, var(--paper)); }
.bits button::before { content: attr(data-digit); }
.bits button[aria-pressed=true] { color: #000; background: var(--field); font-weight: 700; }
.sign { --field: #e69f00; } .exponent { --field: #56b4e9; } .mantissa { --field: #d9d9d9; }
mark { color: #000; background: var(--field); border-radius: 3px; padding: 1px 4px; }
.equation { min-height: 2em; margin: .7rem 0; font-size: 15px; }
.equation b { border: 1px solid; border-radius: 9px; padding: 0 .5rem; margin-left: .6rem;
  font-size: 12px; }
.equation b.odd { color: var(--red-text); }
.rows { border: 0; margin: 0; padding: 0; } .rows legend { color: var(--quiet); padding: 0; }
.rows label { display: flex; flex-wrap: wrap; align-items: center; gap: 0 .6rem; min-height: 26px;
  padding: 0 .3rem; border-radius: 4px; }
.rows label:has(:checked) { background: var(--soft); font-weight: 600; }
.rows label > span:not(.shown) { width: 6.5rem; white-space: nowrap; }
.rows code { font: 13px ui-monospace, monospace; width: 33ch; }
.rows mark { padding: 0; border-radius: 0; }
@media (max-width: 480px) { .rows code { order: 1; } .rows label { padding: .3rem; } }
.step { min-width: 9.5rem; font-variant-numeric: tabular-nums; }
input[aria-invalid=true] { border-color: var(--red); }
`;

function kind(f, bits) {
  const [, exponent, mantissa] = fields(f, bits), value = decode(f, bits);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : "infinity";
  return exponent ? "normal" : mantissa ? "subnormal" : "zero";
}

function factors(f, bits) { // [sign, power of two, significand]: a finite value is their product
  const [sign, exponent, mantissa] = fields(f, bits);
  return [sign ? -1 : 1, Math.max(exponent, 1) - bias(f), (exponent > 0) + mantissa / 2 ** f.m];
}

function parse(text) { // 0.1, 1/3, 2^-24, inf or nan; null for anything else
  const plain = text.trim().toLowerCase().replace("−", "-").replace("∞", "inf");
  if (plain === "nan") return NaN;
  const [, sign, rest] = plain.match(/^([+-]?)(.+)$/) ?? [];
  if (rest === undefined) return null;
  const [top, bottom = "1"] = rest.split("/"), [base, power = "1"] = top.split("^");
  const value = rest === "inf" ? Infinity : Number(base) ** Number(power) / Number(bottom);
  return Number.isNaN(value) ? null : sign === "-" ? -value : value;
}

function verdict(f, asked, bits) { // what became of the number that was asked for, in words
  const value = decode(f, bits), what = kind(f, bits), size = Math.abs(asked);
  const article = {normal: "a normal number", subnormal: "a subnormal number"}[what] ?? what;
  if (Object.is(value, asked)) return `${f.name} has ${written(asked)}: ${article}.`;
  const becomes = `${written(asked)} becomes ${written(value)} in ${f.name}`;
  if (size === Infinity || what === "infinity") return `${becomes}: too large.`;
  if (value === 0) return `${becomes}: too small.`;
  const error = Math.abs((value - asked) / asked) * 100;
  const side = Math.abs(value) < size ? "small" : "large";
  return `${becomes}, ${article}, ${written(error, 2)}% too ${side}.`;
}

function figure(stage, {formats, chosen, value}) {
  let f = formats[chosen], asked = value, bits = encode(f, asked), at = 0, wrong = "";
  const number = make("input", {type: "text", size: 16, autocomplete: "off", spellcheck: "false",
    onchange: () => {
      const typed = parse(number.value), none = Number.isNaN(typed) && !f.nan;
      wrong = typed === null ? `“${number.value}” is no number.` : none ? `${f.name} has no NaN.` : "";
      if (!wrong) [asked, bits] = [typed, encode(f, typed)];
      stage.redraw();
    }, onkeydown: event => {
      const by = {ArrowUp: 1, ArrowDown: -1}[event.key];
      if (by) { event.preventDefault(); set(step(f, bits, by)); }
    }});
  const [down, up] = [-1, 1].map(by => button("", () => set(step(f, bits, by)), {class: "step"}));
  stage.controls.append(
    make("style", {}, STYLE),
    down, make("label", {class: "control"}, make("span", {}, "number"), number), up);

  const board = make("div", {class: "bits", role: "toolbar", "aria-label": "bits", onkeydown: event => {
    const last = f.e + f.m, to = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last}[event.key];
    if (to === undefined) return;
    event.preventDefault();
    at = Math.min(Math.max(to, 0), last);
    stage.redraw();
    keys[at].focus();
  }});
  const equation = make("p", {class: "equation"});
  const rows = formats.map(one => {
    const radio = make("input", {type: "radio", name: "format", checked: one === f && "", onchange: () => {
      [f, bits, at, wrong] = [one, encode(one, asked), 0, ""];
      build();
      stage.redraw();
    }});
    return {one, radio, code: make("code"), shown: make("span", {class: "shown"})};
  });
  stage.picture.append(board, equation, make("fieldset", {class: "rows"},
    make("legend", {}, "the same number in every format; choose one to change it"),
    ...rows.map(({one, radio, code, shown}) =>
      make("label", {}, radio, make("span", {}, one.name), code, shown))));

  let keys = [], captions = [];
  const set = to => { [bits, asked, wrong] = [to, decode(f, to), ""]; stage.redraw(); };
  const flip = i => { at = i; const bit = 2 ** (f.e + f.m - i); set(bits + (digit(i) ? -bit : bit)); };
  const digit = i => Math.floor(bits / 2 ** (f.e + f.m - i)) % 2;
  function build() { // the bits of a format: a button each, one of which takes the Tab key
    captions = ["sign", "exponent", "mantissa"].map(() => make("small", {"aria-hidden": "true"}));
    const worth = i => i === 0 ? "sign bit" : i <= f.e ? `exponent bit worth ${2 ** (f.e - i)}`
      : `mantissa bit worth 1/${2 ** (i - f.e)}`;
    keys = Array.from({length: 1 + f.e + f.m}, (_, i) => button("", () => flip(i), {
      "aria-label": worth(i), title: worth(i)}));
    const groups = [keys.slice(0, 1), keys.slice(1, 1 + f.e), keys.slice(1 + f.e)];
    board.replaceChildren(...groups.map((group, i) =>
      make("div", {class: ["sign", "exponent", "mantissa"][i]}, captions[i], ...group)));
  }
  build();

  const mark = (field, words) => make("mark", {class: field}, words);
  return () => {
    const now = decode(f, bits), [sign, exponent, mantissa] = fields(f, bits), what = kind(f, bits);
    const [, k, significand] = factors(f, bits), [below, above] = [-1, 1].map(by => step(f, bits, by));
    number.setAttribute("aria-invalid", String(wrong !== ""));
    if (!wrong) number.value = written(asked);
    for (const [key, to, words] of [[down, below, "down"], [up, above, "up"]]) {
      key.textContent = `${words === "up" ? "▲" : "▼"} ${written(decode(f, to), 9)}`;
      key.setAttribute("aria-label", `${words} to ${written(decode(f, to), 9)}`);
      key.disabled = to === bits;
    }
    keys.forEach((key, i) => {
      key.dataset.digit = digit(i); // shown by the style: its name and aria-pressed say the same
      key.setAttribute("aria-pressed", String(digit(i) === 1));
      key.tabIndex = i === at ? 0 : -1;
    });
    ["sign", `exponent ${exponent}`, `mantissa ${mantissa}`].forEach((words, i) => {
      captions[i].textContent = words;
    });
    const odd = !Number.isFinite(now), lead = exponent > 0 ? 1 : 0;
    equation.replaceChildren(...(odd ? [`This pattern stands for ${written(now)}.`] : [
      mark("sign", sign ? "−" : "+"), " ", mark("exponent", power(`${Math.max(exponent, 1)}-${bias(f)}`)),
      " × ", mark("mantissa", `${lead} + ${mantissa}/${2 ** f.m}`),
      ` = ${sign ? "−" : "+"}${power(k)} × ${written(significand)} = ${written(now)}`]),
      make("b", {class: what === "normal" ? "" : "odd"}, what));
    for (const {one, radio, code, shown} of rows) {
      radio.disabled = Number.isNaN(asked) && !one.nan;
      const pattern = radio.disabled ? 0 : one === f ? bits : encode(one, asked);
      const text = pattern.toString(2).padStart(1 + one.e + one.m, "0");
      code.style.paddingLeft = `${8 - one.e}ch`;
      code.style.width = `${25 + one.e}ch`;
      code.replaceChildren(mark("sign", text[0]), mark("exponent", text.slice(1, 1 + one.e)),
        mark("mantissa", text.slice(1 + one.e)));
      shown.textContent = radio.disabled ? "no NaN" : written(decode(one, pattern), 10);
      radio.setAttribute("aria-label", `${one.name}: ${shown.textContent}`);
    }
    stage.say(wrong || verdict(f, asked, bits));
  };
}
