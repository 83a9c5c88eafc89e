// A worker that fetches tiles of the timeline and paints them, so that a frame of the page only
// copies pictures. A message asks for one tile; the answer has its picture, or none after an error.

import { getBytes } from "./api.js";

onmessage = async ({ data: { number, run, query, info } }) => {
  try {
    const bitmap = paintTile(await getBytes(run, "tile", query), info);
    postMessage({ number, bitmap }, [bitmap]);
  } catch {
    postMessage({ number, bitmap: null });
  }
};

// Work is stacked from below and waiting above it; the shortest activity of a bin still has a pixel.
// info: {bins, rows, tracks, busy: [by activity], colours: [by activity, "#rrggbb"]}
function paintTile(data, { bins, rows: ROWS, tracks, busy, colours }) {
  const bytes = new DataView(data);
  const height = Math.max(tracks, 1) * ROWS;
  const image = new ImageData(bins, height);
  const pixels = new Uint32Array(image.data.buffer);
  const values = colours.map(pixelOf);
  let offset = 0;
  for (let track = 0; offset < bytes.byteLength && track < tracks; track++) {
    const end = offset + 4 + 4 * bytes.getUint32(offset, true);
    let low = 0, high = ROWS, bin = -1;
    for (offset += 4; offset < end; offset += 4) {
      const at = bytes.getUint16(offset, true);
      if (at !== bin) [low, high, bin] = [0, ROWS, at];
      const activity = bytes.getUint8(offset + 2);
      const rows = Math.max(Math.round((bytes.getUint8(offset + 3) / 255) * ROWS), 1);
      const isBusy = busy[activity];
      const from = isBusy ? Math.max(ROWS - low - rows, 0) : ROWS - high;
      const to = isBusy ? Math.max(ROWS - low, 1) : Math.min(ROWS - high + rows, ROWS);
      for (let y = from; y < to; y++) {
        const place = (track * ROWS + y) * bins + bin;
        if (isBusy || !pixels[place]) pixels[place] = values[activity];
      }
      if (isBusy) low += rows;
      else high -= rows;
    }
  }
  const canvas = new OffscreenCanvas(bins, height);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas.transferToImageBitmap();
}

function pixelOf(colour) { // "#rrggbb" as a little-endian pixel
  const value = Number.parseInt(colour.slice(1), 16);
  return (0xff000000 | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}
