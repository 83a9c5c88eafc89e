// Text of models, readable: control characters and direction marks become visible signs, so that no
// text can hide or reorder what is beside it.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

export function readable(text) {
  return String(text).replace(HIDDEN, (sign) => `⟨${sign.codePointAt(0).toString(16).toUpperCase().padStart(2, "0")}⟩`);
}
