// Head load and routing scores by layer, text and token.

function scoresByToken(model, layer) {
  const shift = headsOf(model) - layer.scores.shape[0];
  const figure = (unpacked, first, title, note) => {
    const matrix = numbers(unpacked);
    const names = Array.from({ length: matrix.rows }, (_, row) => `head ${row + first}`);
    const columnNames = (token) => `${spelled(queriesOf(model).tokens[token])} (${token})`;
    const choose = (row, token) => update({ head: row + first, side: model, token });
    return matrixFigure({ ...matrix, names, columnNames, choose, flat: matrix.columns > 3 * matrix.rows }, title, note);
  };
  return [
    figure(layer.gates, 0, "gates", "heads down, tokens across: how much an output counts"),
    figure(layer.scores, shift, "routing scores", "routed heads down, tokens across: probabilities"),
  ];
}

// One row for each text, for the selected layer.
function loadTable(model) {
  const loads = models[model].texts.map((text) => ({ name: text.name, load: layersIn(model, text)[state.layer].routing.load }));
  const names = loads.map((each) => each.name);
  const matrix = { rows: loads.length, columns: loads[0].load.length, names, at: (row, column) => loads[row].load[column] };
  return matrixFigure(matrix, `head load in ${layerName()}`, "texts down, heads across: part of the tokens", { high: 1, signed: false });
}

section(["text", "layer", "theme"], () => {
  document.getElementById("routing").hidden = !models.some((_, model) => routes(model));
  if (document.getElementById("routing").hidden) return;
  columns("routing", (box, model) => {
    if (!routes(model)) return box.append(make("p", { class: "none" }, `${models[model].name} has no router: every head counts once.`));
    box.append(make("h3", {}, "Head load by layer"), headMap(model, "load"), legend(0, range("load").high));
    const layer = opened[model];
    if (!layer || !layer.record.routing) return box.append(make("p", { class: "none" }, `${capital(layerName())} has no router.`));
    return box.append(
      make("h3", {}, `By text and by token, ${layerName()}`),
      make("div", { class: "cards wide" }, loadTable(model), scoresByToken(model, layer)),
    );
  });
});

section(["text", "theme", "layer", "head"], () => markHead("routing"));
