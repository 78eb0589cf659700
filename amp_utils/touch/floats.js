// amp_utils.formats in JavaScript. A format is {name, e, m, finite, nan}: the widths of exponent
// and mantissa, whether it lacks infinities, and whether it has a NaN. Numbers are float64.

const bias = f => 2 ** (f.e - 1) - 1;
const signBit = f => 2 ** (f.e + f.m);
const infinity = f => signBit(f) - 2 ** f.m; // of the formats that have one
const largest = f => (f.finite ? signBit(f) - 1 - f.nan : infinity(f) - 1);
const negative = x => x < 0 || Object.is(x, -0);

function fields(f, bits) {
  const magnitude = bits % signBit(f);
  return [+(bits >= signBit(f)), Math.floor(magnitude / 2 ** f.m), magnitude % 2 ** f.m];
}

function decode(f, bits) {
  const [sign, exponent, mantissa] = fields(f, bits);
  let value = ((exponent > 0) * 2 ** f.m + mantissa) * 2 ** (Math.max(exponent, 1) - bias(f) - f.m);
  if (bits % signBit(f) > largest(f)) value = mantissa ? NaN : Infinity;
  return sign ? -value : value;
}

const view = new DataView(new ArrayBuffer(8));

function exponentOf(f, x) { // from the bits of the float64; subnormals share the lowest one
  view.setFloat64(0, x);
  return Math.max(((view.getUint16(0) >> 4) & 2047) - 1023, 1 - bias(f));
}

function toEven(x) { // the nearest whole number, for x >= 0
  const up = Math.round(x);
  return up - x === 0.5 && up % 2 ? up - 1 : up;
}

function encode(f, x) {
  const top = negative(x) ? signBit(f) : 0;
  if (Number.isNaN(x) && !f.nan) throw RangeError(`${f.name} has no NaN`);
  if (Number.isNaN(x)) return f.finite ? signBit(f) - 1 : infinity(f) + 2 ** (f.m - 1);
  if (Math.abs(x) === Infinity) return top + (f.finite ? largest(f) : infinity(f));
  const k = exponentOf(f, x), steps = toEven(Math.abs(x) * 2 ** (f.m - k));
  const magnitude = (k + bias(f) - 1) * 2 ** f.m + steps; // a carry raises the exponent field
  return top + (magnitude <= largest(f) ? magnitude : f.finite ? largest(f) : infinity(f));
}

const round = (f, x) => decode(f, encode(f, x));

function step(f, bits, by) { // the next number up (by = 1) or down (-1); ends and NaN stay
  const value = decode(f, bits), away = by > 0 === bits < signBit(f), zero = bits % signBit(f) === 0;
  const end = f.finite ? largest(f) : infinity(f), magnitude = bits % signBit(f);
  if (Number.isNaN(value) || (away && magnitude === end)) return bits;
  if (zero) return 1 + (by < 0) * signBit(f);
  return bits + (away ? 1 : -1);
}

function written(x, digits = 17) {
  const short = Object.is(x, -0) ? "-0" : String(Number(x.toPrecision(digits)));
  return short.replace("Infinity", "∞").replaceAll("-", "−");
}
