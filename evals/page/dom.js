// Elements, text of numbers and tokens, and lists with arrow keys.

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}

function drawing(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function figures(value, digits = 3) {
  if (value === null) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
  return text.replace("-", "−");
}

function percent(weight) {
  const size = Math.abs(weight) * 100;
  const text = size >= 0.1 ? size.toFixed(size < 100 ? 1 : 0) : size.toPrecision(1);
  return `${weight < 0 ? "−" : ""}${size < 0.001 ? "<0.001" : text} %`;
}

// A token in a list or a label, with symbols for invisible characters.
function spelled(piece) {
  const shown = piece.trim() || piece.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣");
  return shown || "⋯";
}

// In the text, line breaks are kept.
function flowing(piece) {
  return piece.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t") || "⋯";
}

function inLine(options, from, down) {
  const here = from.getBoundingClientRect();
  const middle = (rectangle) => (rectangle.left + rectangle.right) / 2;
  let best = null;
  for (const option of options) {
    const there = option.getBoundingClientRect();
    const step = (there.top - here.top) * (down ? 1 : -1);
    if (step < here.height / 2) continue;
    const aside = Math.abs(middle(there) - middle(here));
    if (!best || step < best.step - 2 || (step < best.step + 2 && aside < best.aside)) best = { option, step, aside };
  }
  return best ? best.option : from;
}

const MOVES = {
  ArrowRight: (options, at) => options[Math.min(at + 1, options.length - 1)],
  ArrowLeft: (options, at) => options[Math.max(at - 1, 0)],
  ArrowDown: (options, at) => inLine(options, options[at], true),
  ArrowUp: (options, at) => inLine(options, options[at], false),
  Home: (options) => options[0],
  End: (options) => options[options.length - 1],
};

// One option is in the tab order; the arrow keys select the others.
function listbox(box, choose) {
  const optionOf = (target) => target.closest("[role=option]");
  box.addEventListener("click", (event) => {
    const option = optionOf(event.target);
    if (option) choose(option);
  });
  box.addEventListener("keydown", (event) => {
    const from = optionOf(event.target);
    const move = MOVES[event.key];
    if (!from || !move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const options = [...box.querySelectorAll("[role=option]")];
    const to = move(options, options.indexOf(from));
    to.focus();
    choose(to);
  });
}

function mark(box, chosen) {
  for (const option of box.querySelectorAll("[role=option][aria-selected=true]")) {
    option.setAttribute("aria-selected", "false");
    option.tabIndex = -1;
  }
  if (!chosen) return;
  chosen.setAttribute("aria-selected", "true");
  chosen.tabIndex = 0;
}
