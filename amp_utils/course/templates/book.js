// Search for all of the words that are typed, each at the beginning of a word. `places` is in this file, above: for
// each section of each lesson its page, the lesson's title, the section's heading and address, and its text.
const here = document.currentScript.src, form = document.querySelector("[role=search]");
const box = form.querySelector("input"), found = document.getElementById("found");
const fold = text => text.normalize("NFKC").toLowerCase();
for (const place of places) place.folded = [place.title, place.heading, place.text].map(fold);

// How often a text has a word that begins so; a whole word counts twice.
const count = (text, word) => {
  let total = 0;
  for (let at = text.indexOf(word); at >= 0; at = text.indexOf(word, at + word.length))
    if (!/[\p{L}\p{N}]/u.test(text[at - 1] ?? " "))
      total += /[\p{L}\p{N}]/u.test(text[at + word.length] ?? " ") ? 1 : 2;
  return total;
};

// The title tells most about a section, then its heading; a word that fills its text helps less and less.
const score = (place, words) => {
  const [title, heading, text] = place.folded;
  const each = words.map(word => 8 * Math.min(count(title, word), 2) +
    5 * Math.min(count(heading, word), 2) + 3 * Math.log2(1 + count(text, word)));
  return Math.min(...each) && each.reduce((sum, one) => sum + one);
};

const element = (name, text, ...inside) => {
  const made = document.createElement(name);
  made.append(text, ...inside);
  return made;
};

// The text around the first of the words, which are marked.
const excerpt = (place, words) => {
  const first = Math.min(...words.map(word => place.folded[2].indexOf(word)).filter(at => at >= 0));
  if (first === Infinity) return place.text.slice(0, 160);
  const begin = Math.max(0, place.text.lastIndexOf(" ", Math.max(0, first - 60)));
  const one = words.map(word => word.replace(/[^\p{L}\p{N}_]/gu, "\\$&")).join("|");
  const pieces = place.text.slice(begin, begin + 200).split(new RegExp(`(${one})`, "giu"));
  return element("span", "", ...pieces.map((piece, i) => i % 2 ? element("mark", piece) : piece));
};

const search = () => {
  const words = fold(box.value).split(/\s+/).filter(Boolean);
  const best = places.map(place => [words.length && score(place, words), place])
    .filter(([points]) => points).sort(([a], [b]) => b - a);
  document.body.classList.toggle("searching", words.length > 0);
  found.hidden = !words.length;
  found.querySelector("[role=status]").textContent = best.length > 30
    ? `The best 30 of ${best.length} sections` : `${best.length} section${best.length === 1 ? "" : "s"}`;
  found.querySelector("ol").replaceChildren(...best.slice(0, 30).map(([, place]) => {
    const link = element("a", place.level === "#" ? place.title : `${place.title}: ${place.heading}`);
    link.href = new URL(`${place.page}#${place.id}`, here);
    link.onclick = () => { box.value = ""; search(); };
    return element("li", link, element("br", ""), excerpt(place, words));
  }));
};

const contents = document.getElementById("contents"), current = contents.querySelector("[aria-current]");
if (current) contents.scrollTop = current.offsetTop - contents.clientHeight / 3;
form.hidden = false;
form.onsubmit = event => { event.preventDefault(); found.querySelector("a")?.click(); };
box.oninput = search;
