// The weights of one head for each token.

function tokenName(model, token) {
  return make("span", { class: "token" }, spelled(textOf(model).tokens[token]), make("sub", {}, token));
}

function buildText(model) {
  const pieces = textOf(model).tokens;
  const box = make("div", { class: "text", role: "listbox", "aria-label": `The text in ${pieces.length} tokens` });
  pieces.forEach((piece, token) => {
    box.append(make("span", { role: "option", tabindex: -1, "aria-selected": "false", "data-token": token }, flowing(piece)));
  });
  listbox(box, (option) => update({ side: model, token: Number(option.dataset.token) }));
  return box;
}

// Shades earlier tokens by the weight that this token gives them, and later tokens by the weight that they give it.
function shadeText(box, layer, map, token) {
  Array.from(box.children).forEach((option, other) => {
    const before = other <= token;
    const level = before ? levelAt(layer, map, token, other) : levelAt(layer, map, other, token);
    const name = before ? "key" : "query";
    option.style.background = level ? css(level / LEVELS, name) : "";
    option.style.color = level ? inkOn(level / LEVELS, name) : "";
  });
  mark(box, box.children[token]);
  reveal(box, box.children[token]);
}

// Scrolls the text, not the page.
function reveal(box, option) {
  const above = option.offsetTop - box.scrollTop;
  const slack = box.clientHeight / 6;
  if (above < slack) box.scrollTop -= slack - above;
  else if (above > box.clientHeight - slack) box.scrollTop += above - box.clientHeight + slack;
}

function weightList(model, kind, found, title) {
  const maximum = Math.max(...found.map((each) => Math.abs(each.weight)), 1e-9);
  const rows = found.map(({ token, weight }) => {
    const bar = make("i", { class: "bar-fill", style: `width: ${(Math.abs(weight) / maximum) * 100}%; background: ${css(weight < 0 ? -0.6 : 0.6, kind)}` });
    const value = kind === "key" ? opened[model].values : null;
    return make(
      "tr", { "data-token": token },
      make("th", { scope: "row" }, make("button", { type: "button", onclick: () => update({ side: model, token }) }, tokenName(model, token))),
      make("td", { class: "bar-cell" }, bar), make("td", { class: "number" }, percent(weight)),
      value ? make("td", { class: "number" }, figures(value.at(groupOf(model), token))) : null,
    );
  });
  const head = make(
    "tr", {}, make("th", { scope: "col", colspan: 2 }, title), make("th", { scope: "col", class: "number" }, "weight"),
    kind === "key" ? make("th", { scope: "col", class: "number", title: "norm of the key’s value" }, "‖value‖") : null,
  );
  return make("table", { class: `weights ${kind}s` }, make("thead", {}, head), make("tbody", {}, rows));
}

function bigMap(model) {
  const canvas = make("canvas", { role: "img" });
  const lines = [make("i", { class: "across" }), make("i", { class: "down" })];
  const said = make("p", { class: "reading" }, BLANK);
  canvas.addEventListener("click", (event) => update({ side: model, token: pointed(canvas, event)[0] }));
  canvas.addEventListener("pointermove", (event) => {
    const [query, key] = pointed(canvas, event);
    const pieces = textOf(model).tokens;
    said.textContent =
      key > query ? BLANK
      : `${spelled(pieces[query])} (${query}) → ${spelled(pieces[key])} (${key}): about ${percent(weightAt(opened[model], headOf(model), query, key))}`;
  });
  canvas.addEventListener("pointerleave", () => { said.textContent = BLANK; });
  return make("div", { class: "map" }, make("div", { class: "frame" }, canvas, lines), said);
}

function showToken(model, box) {
  const token = tokenOf(model);
  const map = headOf(model);
  const layer = opened[model];
  const size = textOf(model).tokens.length;
  shadeText(box.querySelector(".text"), layer, map, token);
  box.querySelector(".chosen").replaceChildren(tokenName(model, token), ` token ${token} of 0–${size - 1}`);
  box.querySelector(".lists").replaceChildren(
    weightList(model, "key", greatest(layer.keys, map, token), "attends to"),
    weightList(model, "query", greatest(layer.queries, map, token), "is attended to by"),
  );
  const [across, down] = box.querySelectorAll(".frame i");
  const place = `${((token + 0.5) / size) * 100}%`;
  Object.assign(across.style, { top: place, width: place });
  Object.assign(down.style, { left: place, top: place });
}

section(["text", "layer"], (changed) => {
  if (!changed.has("text") && document.querySelectorAll("#inspector .text").length === opened.filter(Boolean).length) return;
  columns("inspector", (box, model) => {
    if (!opened[model]) return box.append(absent(model));
    return box.append(
      make(
        "div", { class: "inspector" },
        make("div", { class: "reader" }, buildText(model)),
        make("div", { class: "detail" }, make("p", { class: "chosen", "aria-live": "polite" }), make("div", { class: "lists" })),
        bigMap(model),
      ),
    );
  });
});

section(["text", "layer", "head", "theme"], () => {
  document.getElementById("inspector-title").textContent = `Layer ${state.layer}, head ${state.head}, weights of each token`;
  document.querySelectorAll("#inspector .column").forEach((box, model) => {
    const canvas = box.querySelector("canvas");
    if (!canvas) return;
    paintMap(canvas, opened[model], headOf(model));
    const { record } = opened[model];
    canvas.setAttribute("aria-label", `Weights of head ${record.labels[headOf(model)]}: ${character(record, headOf(model))}`);
  });
});

section(["text", "layer", "head", "theme", "token", "side"], () => {
  document.querySelectorAll("#inspector .column").forEach((box, model) => {
    if (opened[model]) showToken(model, box);
  });
});
