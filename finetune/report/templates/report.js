"use strict";
// Follows the pointer (or the arrow keys) over a plot and says the values there. Without scripts the page lacks only this.
const SVG = "http://www.w3.org/2000/svg";

function nearest(points, at) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < at) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - at) <= Math.abs(points[high][0] - at) ? points[low] : points[high];
}

function follow(frame) {
  const plot = JSON.parse(frame.dataset.plot);
  const area = frame.querySelector("svg.area"), cursor = area.querySelector(".cursor");
  const line = cursor.querySelector("line"), readout = frame.parentElement.querySelector(".readout");
  const longest = plot.series.reduce((one, other) => (other.at.length > one.at.length ? other : one));
  const dots = plot.series.map((series) => {
    const dot = document.createElementNS(SVG, "circle");
    dot.setAttribute("r", "3.5");
    dot.setAttribute("class", "mark " + series.style);
    return cursor.appendChild(dot);
  });
  let place = null;

  function show(at) {
    const anchor = nearest(longest.at, at);
    place = longest.at.indexOf(anchor);
    line.setAttribute("x1", anchor[2] + "%");
    line.setAttribute("x2", anchor[2] + "%");
    const said = plot.series.map((series, index) => {
      const point = nearest(series.at, anchor[0]);
      dots[index].setAttribute("cx", point[2] + "%");
      dots[index].setAttribute("cy", point[3]);
      const where = point[0] === anchor[0] ? "" : " (" + plot.name + " " + point[0] + ")";
      return series.name + " " + point[1] + where;
    });
    cursor.setAttribute("visibility", "visible");
    readout.textContent = plot.name + " " + anchor[0] + ": " + said.join(", ");
  }

  function hide() {
    cursor.setAttribute("visibility", "hidden");
    readout.textContent = "";
  }

  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    show(plot.x[0] + share * (plot.x[1] - plot.x[0]));
  });
  area.addEventListener("pointerleave", hide);
  frame.addEventListener("blur", hide);
  frame.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = place === null ? 0 : Math.min(longest.at.length - 1, Math.max(0, place + step));
    show(longest.at[next][0]);
  });
}

document.querySelectorAll(".frame").forEach(follow);

// What is folded on the screen is printed in full.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
