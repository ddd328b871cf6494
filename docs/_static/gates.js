// Somebody's own log decays, from a file that is read in the page: how far each anchor is from breaking (the model
// "headroom"), and the explorer's maps of the tokens where one breaks first.

(() => {
  // Files: bytes to numbers, as flakit/cases/decay_files.py reads them.

  class Refused extends Error {}

  const half = (bits, exponentBits, fractionBits) => {
    const fraction = bits & (1 << fractionBits) - 1, exponent = bits >> fractionBits & (1 << exponentBits) - 1;
    const sign = bits >> exponentBits + fractionBits ? -1 : 1, bias = (1 << exponentBits - 1) - 1;
    if (exponent === (1 << exponentBits) - 1) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? (1 + fraction / (1 << fractionBits)) * 2 ** (exponent - bias) : fraction / (1 << fractionBits) * 2 ** (1 - bias));
  };
  const FORMATS = {
    F64: [8, (view, at, little) => view.getFloat64(at, little)],
    F32: [4, (view, at, little) => view.getFloat32(at, little)],
    F16: [2, (view, at, little) => half(view.getUint16(at, little), 5, 10)],
    BF16: [2, (view, at, little) => half(view.getUint16(at, little), 8, 7)],
  };

  const numbers = (buffer, from, count, [size, get], little, words) => {
    if (from + count * size > buffer.byteLength) throw new Refused(words.cut);
    const view = new DataView(buffer, from), all = new Float64Array(count);
    for (let n = 0; n < count; n++) all[n] = get(view, n * size, little);
    return all;
  };
  const product = shape => shape.reduce((a, b) => a * b, 1);

  const npy = (buffer, {words, say}) => {
    const view = new DataView(buffer), wide = view.getUint8(6) > 1, start = wide ? 12 : 10;
    const length = wide ? view.getUint32(8, true) : view.getUint16(8, true);
    const header = new TextDecoder("latin1").decode(new Uint8Array(buffer, start, length));
    const descr = /'descr': *'([^']+)'/.exec(header)?.[1] ?? "?", shape = /'shape': *\(([^)]*)\)/.exec(header)[1].split(",").filter(each => each.trim()).map(Number);
    const format = {f8: "F64", f4: "F32", f2: "F16"}[descr.slice(1)];
    if (!format) throw new Refused(say(words.format, {got: descr}));
    const all = numbers(buffer, start + length, product(shape), FORMATS[format], descr[0] !== ">", words);
    if (!/'fortran_order': *True/.test(header)) return new Map([["", {shape, all}]]);
    const turned = new Float64Array(all.length), index = shape.map(() => 0);
    for (let n = 0; n < all.length; n++) { // the first index runs fastest in the file
      turned[index.reduce((at, i, axis) => at * shape[axis] + i, 0)] = all[n];
      for (let axis = 0; axis < shape.length && ++index[axis] === shape[axis]; axis++) index[axis] = 0;
    }
    return new Map([["", {shape, all: turned}]]);
  };

  const safetensors = (buffer, {words, say}) => {
    const length = Number(new DataView(buffer).getBigUint64(0, true));
    if (8 + length > buffer.byteLength) throw new Refused(words.cut);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
    return new Map(Object.entries(header).filter(([name]) => name !== "__metadata__").map(([name, {dtype, shape, data_offsets: [from]}]) => {
      if (!FORMATS[dtype]) throw new Refused(say(words.format, {got: dtype}));
      return [name, {shape, all: numbers(buffer, 8 + length + from, product(shape), FORMATS[dtype], true, words)}];
    }));
  };

  /** Decays [T, columns] by the layer and the batch that they are of. */
  const sequences = async (file, tools) => {
    const {words, say} = tools, reader = /\.npy$/i.test(file.name) ? npy : /\.safetensors$/i.test(file.name) ? safetensors : null;
    if (!reader) throw new Refused(words.kind);
    let layers;
    try {
      layers = reader(await file.arrayBuffer(), tools);
    } catch (error) {
      throw error instanceof Refused ? error : new Refused(words.cut);
    }
    const found = [];
    for (const [layer, {shape, all}] of layers) {
      const [B, T, heads, channels] = shape;
      if (shape.length !== 4 || !all.length) throw new Refused(say(words.shapes, {shape: shape.join(", ")}));
      const wrong = all.find(x => !(x <= 0));
      if (wrong !== undefined) throw new Refused(say(words.positive, {got: Number.isNaN(wrong) ? "NaN" : wrong}));
      for (let b = 0; b < B; b++) {
        const size = T * heads * channels;
        found.push({name: `${layer ? `${layer}, ` : ""}${B > 1 ? `batch ${b}, ` : ""}`, T, heads, channels, all: all.subarray(b * size, (b + 1) * size)});
      }
    }
    return found;
  };

  /** What the model finds in the rows [from, to) of some columns: by scheme, factor, exponent, token and column. */
  const margins = async ({T, heads, channels, all}, from, to, column, {sizes, limits, held}, run) => {
    const {window, columns, chunk} = sizes, width = heads * channels, w = new Float64Array(window * columns);
    const end = Math.ceil(to / chunk) * chunk, before = window - end; // the last chunk stands at the window's end
    for (let t = from; t < to; t++) {
      w.set(all.subarray(t * width + column, t * width + Math.min(column + columns, width)), (before + t) * columns);
    }
    const found = await run("headroom", {
      w: {data: w, shape: [1, window, 1, columns]}, length: {data: BigInt64Array.of(BigInt(before + to)), shape: []},
      limits: {data: Float64Array.from(limits), shape: [2]},
    });
    const each = found.margins.data;
    return Object.fromEntries(held.map((scheme, n) => {
      const [factor, exponent, row, , at] = each.subarray(5 * n, 5 * n + 5);
      return [scheme, {factor, exponent, token: Math.min(row - before, T - 1), column: column + at}];
    }));
  };

  /** Of every scheme the least factor of a sequence, with its place, and the first chunk that breaks. */
  const headroom = async (sequence, about, run, progress) => {
    const {sizes: {window, columns, chunk}, held} = about, {T, heads, channels} = sequence, stride = window - chunk;
    const worst = {}, first = {};
    for (let from = 0; from < T; from += stride) {
      const to = Math.min(from + stride, T), breaking = Object.fromEntries(held.map(scheme => [scheme, []]));
      for (let column = 0; column < heads * channels; column += columns) {
        const found = await margins(sequence, Math.max(0, from - chunk), to, column, about, run);
        for (const scheme of held) {
          if (!(worst[scheme]?.factor <= found[scheme].factor)) worst[scheme] = found[scheme];
          if (found[scheme].factor < 1) breaking[scheme].push(column);
        }
        await progress();
      }
      for (const scheme of held.filter(each => breaking[each].length && !first[each])) {
        for (let at = from; at < to && !first[scheme]; at += chunk) {
          for (const column of breaking[scheme]) {
            const found = (await margins(sequence, Math.max(0, at - chunk), Math.min(at + chunk, T), column, about, run))[scheme];
            if (found.factor < 1 && !(first[scheme]?.factor <= found.factor)) first[scheme] = {...found, chunk: at};
          }
        }
      }
    }
    return held.map(scheme => ({scheme, ...worst[scheme], first: first[scheme], sequence}));
  };

  /** The part of an explorer that takes a file. */
  window.flakitGates = (panel, {run, say, make, number, later}) => {
    const {words, about} = panel, tools = {words, say}, {sizes} = about;
    const input = make("input", {type: "file", accept: ".npy,.safetensors", hidden: true});
    const choose = make("button", {type: "button", textContent: words.choose});
    const asked = make("p", {className: "flakit-drop"}, `${words.drop} `, choose, input), table = make("div", {className: "flakit-headroom"});
    choose.addEventListener("click", () => input.click());
    input.addEventListener("change", () => input.files[0] && take(input.files[0]));
    panel.own.append(asked, table);
    for (const event of ["dragover", "drop"]) {
      panel.player.root.addEventListener(event, dragged => {
        if (!panel.root.isConnected || ![...dragged.dataTransfer.types].includes("Files")) return;
        dragged.preventDefault();
        panel.own.classList.toggle("flakit-over", event === "dragover");
        if (event === "drop" && dragged.dataTransfer.files[0]) take(dragged.dataTransfer.files[0]);
      });
    }
    panel.player.root.addEventListener("dragleave", () => panel.own.classList.remove("flakit-over"));

    const take = async file => {
      const told = make("p", {role: "status"});
      table.replaceChildren(told);
      try {
        const all = await sequences(file, tools), found = [];
        for (const [n, sequence] of all.entries()) {
          told.textContent = say(words.reading, {name: file.name, part: n + 1, all: all.length});
          found.push(...await headroom(sequence, about, run, later));
        }
        tell(file, found);
      } catch (error) {
        if (!(error instanceof Refused)) console.error("flakit:", error);
        told.textContent = say(words.refused, {name: file.name, why: error.message});
      }
    };

    const tell = (file, found) => {
      const rows = about.held.map(scheme => {
        const each = found.filter(one => one.scheme === scheme).reduce((a, b) => b.factor < a.factor ? b : a);
        const breaks = each.factor < 1, some = Number.isFinite(each.factor), {channels, name} = each.sequence;
        const place = {layer: name, t: each.token, h: Math.floor(each.column / channels), c: each.column % channels};
        const cells = some ? [`× ${number(each.factor, 3)}`, number(each.exponent), say(words.place, place)] : [words.never, "0", ""];
        const verdict = make("td", {}, breaks ? words.breaks : words.holds);
        if (breaks) {
          const look = make("button", {type: "button", textContent: words.sees});
          look.setAttribute("aria-label", `${words.sees}: ${about.schemes[scheme]}`);
          look.addEventListener("click", () => show(scheme, found.find(one => one.scheme === scheme && one.first)));
          verdict.append(" ", look);
        }
        const named = make("td", {textContent: scheme, title: about.schemes[scheme]});
        const row = make("tr", {"data-scheme": scheme}, named, verdict, ...cells.map(textContent => make("td", {textContent})));
        Object.assign(row.dataset, {factor: each.factor, token: some ? each.token : "", first: each.first?.chunk ?? ""});
        return row;
      });
      const head = make("tr", {}, ...words.heads.map(textContent => make("th", {textContent, scope: "col"})));
      const caption = make("p", {textContent: say(words.table, {name: file.name})});
      const scrolls = make("div", {className: "flakit-scrolls", tabIndex: 0, role: "region", "aria-label": caption.textContent});
      scrolls.append(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
      table.replaceChildren(caption, scrolls);
      table.dataset.done = file.name;
      const breaking = found.find(one => one.first && one.scheme === panel.setting.scheme) ?? found.find(one => one.first);
      if (breaking) show(breaking.scheme, breaking);
    };

    /** The explorer with the decays around the place where a scheme breaks first: two chunks, and as many channels as fit. */
    const show = (scheme, {sequence, first}) => {
      const {T, K, chunk} = sizes, {heads, channels, all, name} = sequence, width = heads * channels;
      const from = Math.max(0, about.across.includes(scheme) ? first.chunk - chunk : first.chunk), length = Math.min(T, sequence.T - from);
      const h = Math.floor(first.column / channels), c = Math.max(0, Math.min(first.column % channels, channels - K)), some = Math.min(K, channels - c);
      const decays = new Float32Array(T * K);
      for (let t = 0; t < length; t++) decays.set(all.subarray((from + t) * width + h * channels + c, (from + t) * width + h * channels + c + some), t * K);
      const said = {layer: name, h, c, d: c + some - 1, a: from, b: from + length - 1};
      panel.gates = {decays, length, token: from, said: seed => say(words.gates, {...said, seed})};
      panel.move({scheme});
    };
  };
})();
