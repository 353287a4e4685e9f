// The fixed controls, and the header of the page.

function choice(label, options, value, choose) {
  const select = make("select", { onchange: (event) => choose(Number(event.target.value)) });
  options.forEach((text, index) => select.append(make("option", { value: index, selected: index === value }, text)));
  return make("label", { class: "control" }, make("span", {}, label), select);
}

function layerControl() {
  const last = deepest() - 1;
  const range = make("input", {
    type: "range", id: "layer", min: 0, max: last, value: state.layer,
    oninput: (event) => update({ layer: Number(event.target.value) }),
  });
  const step = (by, sign, label) =>
    make("button", { type: "button", "aria-label": label, onclick: () => update({ layer: state.layer + by }) }, sign);
  return make(
    "div", { class: "control layer" },
    make("label", { for: "layer" }, "Layer"), step(-1, "‹", "Previous layer"), range, step(1, "›", "Next layer"),
    make("output", { for: "layer", id: "layer-value" }),
  );
}

function headChoice() {
  return choice("Head", mapLabels(), state.head, (head) => update({ head }));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  update({ theme });
}

function themeButton() {
  return make(
    "button",
    {
      type: "button", id: "theme",
      onclick: () => setTheme(THEMES[(THEMES.indexOf(state.theme) + 1) % THEMES.length]),
    },
    `Colours: ${state.theme}`,
  );
}

section(["text", "layer", "head", "theme"], (changed) => {
  const bar = document.getElementById("controls");
  if (!bar.firstChild) {
    const titles = models[0].texts.map((text) => text.name);
    bar.append(
      titles.length > 1 ? choice(kindOf(models[0].texts[0]), titles, state.text, (text) => update({ text, token: 0, key: 0 })) : "",
      hasParts() ? choice("Attention", models[0].parts.map(({ name }) => PARTS[name]), state.part, (part) => update({ part })) : "",
      layerControl(), make("span", { id: "head" }), make("span", { id: "scheme" }),
    );
  }
  document.getElementById("layer").max = deepest() - 1;
  document.getElementById("layer").value = state.layer;
  document.getElementById("layer-value").textContent = `${state.layer} of 0–${deepest() - 1}`;
  const head = document.querySelector("#head select");
  if (head && !changed.has("layer") && !changed.has("text")) head.value = state.head;
  else document.getElementById("head").replaceChildren(headChoice());
  const button = document.getElementById("theme");
  if (button) button.textContent = `Colours: ${state.theme}`;
  else document.getElementById("scheme").replaceChildren(themeButton());
});

// The value of an option; a range for consecutive numbers.
function optionValue(value) {
  if (!Array.isArray(value)) return String(value);
  const runs = value.length > 2 && value.every((each, index) => each === value[0] + index);
  if (runs) return `${value[0]}–${value[value.length - 1]}`;
  return value.length ? value.join(" + ") : "none";
}

// The mechanisms by name; those of a part have its name before them.
function mechanismsOf({ mixers, parts }) {
  const names = parts.map(({ name }) => name);
  const byPart = Object.keys(mixers).some((name) => names.includes(name));
  if (!byPart) return Object.entries(mixers);
  return Object.entries(mixers).flatMap(([part, ofPart]) =>
    Object.entries(ofPart).map(([name, options]) => [`${PARTS[part]}: ${name}`, options]));
}

function factsOf(model) {
  const names = mechanismsOf(model).map(([name, options]) => {
    const said = Object.entries(options).map(([option, value]) => `${option.replaceAll("_", " ")} ${optionValue(value)}`);
    return make("li", {}, make("b", {}, name), ` ${said.join(", ")}`);
  });
  for (const [name, distance] of Object.entries(model.drift)) {
    names.push(make("li", {}, make("b", {}, name), ` has moved by ${distance.toPrecision(3)} from its start in training`));
  }
  const sizes = [
    model.model_type, `${(model.parameters / 1e6).toFixed(model.parameters < 1e7 ? 2 : 0)} M parameters`,
    ...(hasParts() || model.parts[0].name === "last" ? model.parts.map(({ name, layers }) => `${layers} ${PARTS[name]} layers`) : [`${model.layers} layers`]),
    `${model.query_heads} query heads`, `${model.key_value_heads} key/value heads`,
    `${model.head_dim} features a head`,
  ];
  return [
    make("p", { class: "facts" }, sizes.join(" · ")),
    names.length ? make("ul", { class: "mixers" }, names) : make("p", { class: "facts" }, "no mechanism: stock attention"),
  ];
}

function kindOf(text) {
  return text.image ? "Image" : "Text";
}

function introduce() {
  const names = models.map((model) => model.name);
  document.title = `Attention heads of ${names.join(" and ")}`;
  document.getElementById("title").replaceChildren(
    ...names.flatMap((name, index) => [index ? " and " : "Attention heads of ", make("em", { class: `model-${index}` }, name)]),
  );
  columns("facts", (box, index) => box.append(...factsOf(models[index])));
  const texts = models[0].texts.map(({ name, tokens, target }) =>
    `${name}, ${tokens.length} tokens${target ? ` and ${target.tokens.length} of the target` : ""}`);
  document.getElementById("texts").textContent = `${texts.join(" · ")} (a page holds up to ${report.longest_text})`;
}
