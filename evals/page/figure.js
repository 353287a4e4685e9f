// Figures of several sections: a matrix, its legend, a line chart over tokens or layers.

const LARGEST_TABLE = 12;
const BLANK = "\u00a0";

function legend(low, high, said = null) {
  const scale = make("i", { style: `background: ${gradient(low < 0 ? -1 : 0)}` });
  return make("div", { class: "legend" }, make("span", {}, figures(low)), scale, make("span", {}, figures(high)), said);
}

function hundredths(value) {
  return value === null ? "–" : value.toFixed(2).replace(/^-(?=0\.00$)/, "").replace("-", "−");
}

// The maximum size of a matrix, and whether it has negative values.
function extent({ rows, columns: width, at }) {
  let high = 0;
  let signed = false;
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < width; column += 1) {
      const value = at(row, column);
      if (value < 0) signed = true;
      high = Math.max(high, Math.abs(value));
    }
  }
  return { high: high || 1, signed };
}

function matrixTable(matrix, high, label) {
  const cells = (row) =>
    Array.from({ length: matrix.columns }, (_, column) => {
      const value = matrix.at(row, column);
      const shade = `background: ${css(value / high)}; color: ${inkOn(value / high)}`;
      return make("td", { style: shade }, hundredths(value));
    });
  const names = (index) => (matrix.names ? matrix.names[index] : index);
  const top = make("tr", {}, make("td"), Array.from({ length: matrix.columns }, (_, column) => make("th", { scope: "col" }, column)));
  const body = Array.from({ length: matrix.rows }, (_, row) =>
    make("tr", {}, make("th", { scope: "row" }, names(row)), cells(row)),
  );
  return make("div", { class: "scroll" }, make("table", { class: "matrix", "aria-label": label }, make("tbody", {}, top, body)));
}

function paint(canvas, rows, width, colourAt) {
  canvas.width = width;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, rows);
  let place = 0;
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < width; column += 1) {
      const [red, green, blue] = colourAt(row, column);
      image.data[place] = red;
      image.data[place + 1] = green;
      image.data[place + 2] = blue;
      image.data[place + 3] = 255;
      place += 4;
    }
  }
  context.putImageData(image, 0, 0);
}

// The row and column under the pointer.
function pointed(canvas, event) {
  const box = canvas.getBoundingClientRect();
  const part = (at, start, size, count) => Math.max(0, Math.min(count - 1, Math.floor(((at - start) / size) * count)));
  return [
    part(event.clientY, box.top, box.height, canvas.height), part(event.clientX, box.left, box.width, canvas.width),
  ];
}

// `said` shows the value under the pointer.
function matrixCanvas(matrix, high, label, said) {
  const canvas = make("canvas", { class: "matrix", role: "img", "aria-label": label });
  canvas.style.aspectRatio = `${matrix.columns} / ${matrix.flat ? matrix.columns / 3 : matrix.rows}`;
  paint(canvas, matrix.rows, matrix.columns, (row, column) => rgb(matrix.at(row, column) / high));
  const row = (index) => (matrix.names ? matrix.names[index] : `row ${index}`);
  const column = (index) => (matrix.columnNames ? matrix.columnNames(index) : `column ${index}`);
  canvas.addEventListener("pointermove", (event) => {
    const [down, across] = pointed(canvas, event);
    said.textContent = `${row(down)}, ${column(across)}: ${figures(matrix.at(down, across))}`;
  });
  canvas.addEventListener("pointerleave", () => { said.textContent = ""; });
  if (matrix.choose) canvas.addEventListener("click", (event) => matrix.choose(...pointed(canvas, event)));
  return canvas;
}

// A small matrix as a table of numbers, a large one as a picture.
function matrixFigure(matrix, title, note, range = null) {
  const { high, signed } = range || extent(matrix);
  const label = `${title}: ${matrix.rows} rows, ${matrix.columns} columns, from ${signed ? figures(-high) : 0} to ${figures(high)}`;
  const said = make("span", { class: "reading" });
  const small = matrix.rows <= LARGEST_TABLE && matrix.columns <= LARGEST_TABLE;
  return make(
    "figure", { class: small ? "card" : `card picture ${matrix.flat ? "flat" : ""}` },
    make("figcaption", {}, make("b", {}, title), note ? make("span", {}, note) : null),
    small ? matrixTable(matrix, high, label) : matrixCanvas(matrix, high, label, said),
    legend(signed ? -high : 0, high, said),
  );
}

const WIDTH = innerWidth < 620 ? 350 : 540;
const HEIGHT = 150;
const EDGE = { left: 44, right: 8, top: 10, bottom: 22 };

// Lines over 0, 1, 2, ..., each with a name, values and a class; `mark` is the place of a vertical line.
function lineChart(lines, { label, across, mark: at = null, floor = 0 }) {
  const known = lines.flatMap((line) => line.values.filter((value) => value !== null));
  const high = Math.max(...known, floor + 1e-9);
  const low = Math.min(...known, floor);
  const longest = Math.max(...lines.map((line) => line.values.length));
  const x = (index) => EDGE.left + (index / Math.max(1, longest - 1)) * (WIDTH - EDGE.left - EDGE.right);
  const y = (value) => EDGE.top + ((high - value) / (high - low)) * (HEIGHT - EDGE.top - EDGE.bottom);
  const chart = drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label, class: "chart" });
  for (const value of [low, (low + high) / 2, high]) {
    chart.append(
      drawing("line", { x1: EDGE.left, x2: WIDTH - EDGE.right, y1: y(value), y2: y(value), class: "grid" }),
      drawing("text", { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" }, figures(value, 2)),
    );
  }
  chart.append(
    drawing("text", { x: EDGE.left, y: HEIGHT - 5 }, `${across} 0`),
    drawing("text", { x: WIDTH - EDGE.right, y: HEIGHT - 5, "text-anchor": "end" }, String(longest - 1)),
  );
  if (at !== null) chart.append(drawing("line", { x1: x(at), x2: x(at), y1: EDGE.top, y2: HEIGHT - EDGE.bottom, class: "here" }));
  for (const { values, kind } of lines) {
    const points = values.map((value, index) => (value === null ? null : `${x(index)},${y(value)}`)).filter(Boolean);
    chart.append(
      points.length > 1
        ? drawing("polyline", { points: points.join(" "), class: `line ${kind}` })
        : drawing("circle", { cx: x(0), cy: y(values[0] ?? low), r: 3, class: `dot ${kind}` }),
    );
  }
  return chart;
}
