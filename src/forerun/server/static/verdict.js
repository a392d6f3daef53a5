// What a run showed, in words and as a class of its frame: only what is faster is green.

/** Of equal texts or not, and the ratio of their speeds, 0 if it is not known. */
export function outcome(equal, ratio) {
  const kind = !equal ? "different" : ratio >= 1.005 ? "equal faster" : "equal";
  if (!ratio) return { kind, times: "" };
  const slower = Math.round(100 * (1 - ratio));
  return { kind, times: slower > 0 ? `${slower} % slower` : `${ratio.toFixed(2)} times as fast` };
}
