// Small helpers that every other file uses.
const $ = (id) => document.getElementById(id);

/** A new element. Strings become text nodes: nothing that a model writes is ever read as HTML. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** The value of a CSS variable, as it is in the light or dark theme of now. */
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** Sizes a canvas to its box and the screen's pixels; its context in CSS pixels, or null while it is not shown. */
function prepared(canvas) {
  const width = canvas.clientWidth, height = canvas.clientHeight, scale = devicePixelRatio || 1;
  if (!width || !height) return null;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** Seconds for people. */
function duration(seconds) {
  const us = seconds * 1e6;
  if (us < 1000) return `${us < 10 ? us.toFixed(1) : Math.round(us)} µs`;
  if (us < 1e6) return `${(us / 1000).toPrecision(3)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}
