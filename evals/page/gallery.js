// The attention maps of all heads of a layer.

const THUMBNAIL = 170;

// The maximum of `joined` x `joined` neighbours, so that thin lines stay visible.
function paintMap(canvas, layer, map, joined = 1) {
  const size = layer.maps.shape[1];
  const outside = channels(SHADES[scheme()].outside);
  const start = startOf(layer, map);
  const whole = layer.maps.whole;
  const strongest = (row, column) => {
    let found = 0;
    for (let query = row * joined; query < Math.min((row + 1) * joined, size); query += 1) {
      const line = start + (query * (query + 1)) / 2;
      for (let key = column * joined; key < Math.min((column + 1) * joined, query + 1); key += 1) {
        if (Math.abs(whole[line + key]) > Math.abs(found)) found = whole[line + key];
      }
    }
    return found;
  };
  const drawn = Math.ceil(size / joined);
  paint(canvas, drawn, drawn, (row, column) => (column > row ? outside : rgb(strongest(row, column) / LEVELS)));
}

// A short description of a map by its largest measure.
function character(record, map) {
  const { first, previous, own, distance } = record.measures;
  const shares = [["first token", first[map]], ["token before", previous[map]], ["itself", own[map]]];
  const [name, share] = shares.sort((one, other) => other[1] - one[1])[0];
  return share >= 0.2 ? `${name} ${Math.round(share * 100)} %` : `${figures(distance[map], 2)} tokens back`;
}

section(["text", "layer", "theme"], () => {
  document.getElementById("gallery-title").textContent = `Heads of layer ${state.layer}`;
  columns("gallery", (box, model) => {
    const layer = opened[model];
    if (!layer) return box.append(absent(model));
    const list = make("div", { class: "gallery", role: "listbox", "aria-label": `Heads of layer ${state.layer}` });
    layer.record.labels.forEach((label, map) => {
      const canvas = make("canvas", { "aria-hidden": "true" });
      paintMap(canvas, layer, map, Math.ceil(layer.maps.shape[1] / THUMBNAIL));
      const said = character(layer.record, map);
      const title = /^\d+$/.test(label) ? `Head ${label}` : label;
      list.append(
        make(
          "div", { role: "option", tabindex: -1, "aria-selected": "false", "data-head": map, "aria-label": `${title}: ${said}` },
          canvas, make("b", {}, title), make("span", {}, said),
        ),
      );
    });
    listbox(list, (option) => update({ head: Number(option.dataset.head) }));
    return box.append(list);
  });
});

section(["text", "layer", "theme", "head"], () => {
  document.querySelectorAll("#gallery .gallery").forEach((list) => {
    mark(list, list.children[Math.min(state.head, list.children.length - 1)]);
  });
});
