// Norms of values and outputs: by head, and by token of the selected head.

function bars(values, chosen, kind, label) {
  const maximum = Math.max(...values, 1e-9);
  const rows = values.map((value, index) =>
    make(
      "tr", { class: index === chosen ? "here" : "" },
      make("th", { scope: "row" }, index),
      make("td", { class: "bar-cell" }, make("i", { class: "bar-fill", style: `width: ${(value / maximum) * 100}%; background: ${css(0.6, kind)}` })),
      make("td", { class: "number" }, figures(value)),
    ),
  );
  return make("table", { class: "weights", "aria-label": label }, make("caption", {}, label), make("tbody", {}, rows));
}

function rowOf(matrix, row) {
  return Array.from({ length: matrix.columns }, (_, column) => matrix.at(row, column));
}

section(["text", "layer", "head", "token", "key", "side", "theme"], () => {
  document.getElementById("norms-title").textContent = `Norms of values and outputs in ${layerName()}`;
  columns("norms", (box, model) => {
    const layer = opened[model];
    if (!layer) return box.append(absent(model));
    const { measures } = layer.record;
    const head = outputOf(model);
    const group = groupOf(model);
    const chart = (matrix, row, kind, token, label) =>
      make("figure", { class: "card" }, make("figcaption", {}, make("b", {}, label)),
        lineChart([{ values: rowOf(matrix, row), kind }], { label, across: "token", mark: token }));
    return box.append(
      make(
        "div", { class: "cards wide" },
        make("div", { class: "card pair" }, bars(measures.output_norm, head, "query", "outputs, by head"),
          bars(measures.value_norm, group, "key", "values, by key/value head")),
        chart(layer.outputs, head, "query", tokenOf(model), `output of head ${head}, by token`),
        chart(layer.values, group, "key", keyOf(model), `value of key/value head ${group}, by token`),
      ),
    );
  });
});
