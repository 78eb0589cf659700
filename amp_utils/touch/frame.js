// The frame of every figure: its elements, labelled controls, theme, width, and the result in words.

const DRAWN = new Set(["svg", "g", "path", "rect", "line", "circle", "polyline", "text", "tspan"]);

// An element with attributes and children; "onclick" and the like listen, false leaves one out.
function make(tag, attributes = {}, ...children) {
  const space = DRAWN.has(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const node = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// A labelled slider; words(value) stands beside it and is read aloud in place of the number.
function slider(label, {min, max, step = 1, value}, words, changed) {
  const shown = make("span", {class: "value", "aria-hidden": "true"}, words(value));
  const input = make("input", {type: "range", min, max, step, value, "aria-valuetext": words(value)});
  input.addEventListener("input", () => {
    shown.textContent = words(input.valueAsNumber);
    input.setAttribute("aria-valuetext", shown.textContent);
    changed(input.valueAsNumber);
  });
  return make("label", {class: "control wide"}, make("span", {}, label), input, shown);
}

// A labelled list; options are {value: words}, and changed gets the value, a string.
function choice(label, options, value, changed) {
  const entries = Object.entries(options).map(
    ([key, words]) => make("option", {value: key, selected: key === value && ""}, words));
  const select = make("select", {onchange: () => changed(select.value)}, ...entries);
  return make("label", {class: "control"}, make("span", {}, label), select);
}

// A button; for one that stays down, set its aria-pressed to "true" or "false".
function button(label, pressed, attributes = {}) {
  return make("button", {type: "button", onclick: pressed, ...attributes}, label);
}

// 2 to the power of a whole number, as it is printed.
function power(exponent) {
  return "2" + String(exponent).replace(/./g, sign => "⁰¹²³⁴⁵⁶⁷⁸⁹"[sign] ?? "⁻");
}

// Dark where the text around it is light: so the page decides, JupyterLab's theme or the system.
function followTheme(host) {
  const follow = () => {
    const [red, green, blue] = getComputedStyle(host).color.match(/[\d.]+/g).map(Number);
    host.toggleAttribute("data-dark", 3 * red + 6 * green + blue > 1280);
  };
  follow();
  const observer = new MutationObserver(follow), options = {attributes: true};
  for (const node of [document.documentElement, document.body]) observer.observe(node, options);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", follow);
}

// Puts a figure in the place of the drawing that stands still. figure(stage) returns draw(width).
function frame(host, style, label, figure) {
  const [controls, picture] = ["controls", "picture"].map(part => make("div", {class: part}));
  const result = make("p", {role: "status"});
  let draw = null, width = 0;
  const stage = {
    controls, // takes sliders, choices and buttons
    picture, // takes the drawing, as wide as draw was told; picture.replaceChildren(…)
    say(words) { if (result.textContent !== words) result.textContent = words; }, // the result
    redraw() { if (width) draw(width); }, // to be called when the state has changed
  };
  draw = figure(stage);
  host.setAttribute("data-ready", "");
  host.attachShadow({mode: "open"}).append(
    make("style", {}, style),
    make("div", {class: "frame", role: "group", "aria-label": label}, controls, picture, result));
  followTheme(host);
  new ResizeObserver(() => {
    const now = Math.floor(picture.clientWidth);
    if (now === width) return;
    width = now;
    stage.redraw();
  }).observe(picture);
}
