// What a run showed, in words and as a class of its frame: only what is faster is green.

const DOUBT = 1.1; // a pass with drafts costs no less than one without, except for noise

/** Of equal texts or not, the ratio of their speeds, 0 if it is not known, and that of their passes. */
export function outcome(equal, ratio, passes) {
  const disturbed = ratio > DOUBT * Math.max(1, passes);
  const kind = !equal ? "different" : ratio >= 1.005 && !disturbed ? "equal faster" : "equal";
  if (!ratio) return { kind, times: "", disturbed };
  if (disturbed) return { kind, times: "The plain run was disturbed", disturbed };
  const slower = Math.round(100 * (1 - ratio));
  return { kind, times: slower > 0 ? `${slower} % slower` : `${ratio.toFixed(2)} times as fast`, disturbed };
}
