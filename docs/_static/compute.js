// Computes what a panel shows, in the page: "compute here" loads onnxruntime-web and the models that docs/computed.py has
// exported from PyTorch. Here inputs are laid out, NaN is counted and pictures are drawn; every number comes from a model.

(() => {
  const FOLDER = new URL("computed/", document.currentScript.src).href;
  const LEAST = 4; // pixels: what is broken is drawn no thinner
  const SETTLED = 400; // ms after the last move until the address follows and onsets are measured
  const PANELS = ["sketch-broken", "decay-explorer"];

  const {make, reader, unpacked} = window.flakitPage;
  const arrived = new Map(), load = reader(FOLDER, arrived);
  window.flakitArrived = (name, what) => arrived.set(`${name}.js`, what);
  const read = name => load(`${name}.js`);
  const once = make => { let made; return () => made ??= make(); };
  const kept = make => {
    const made = new Map();
    return name => { if (!made.has(name)) made.set(name, make(name)); return made.get(name); };
  };

  // What computes. The module comes from a blob and the WebAssembly as bytes, so that neither is fetched.
  const runtime = once(async () => {
    const packed = await read("runtime"), [code, wasm] = [await unpacked(packed.module, "gzip"), await unpacked(packed.wasm, "gzip")];
    const ort = await import(URL.createObjectURL(new Blob([code], {type: "text/javascript"})));
    ort.env.wasm.numThreads = 1; // more would need a page that is isolated from all others
    ort.env.wasm.wasmBinary = wasm;
    return ort;
  });
  const session = kept(async name => {
    const [ort, model] = [await runtime(), await unpacked(await read(name), "gzip")];
    return ort.InferenceSession.create(new Uint8Array(model), {executionProviders: ["wasm"]});
  });
  const seedOf = kept(async name => new Float32Array(await unpacked(await read(`seed-${name}`), "gzip")));

  /** A model's outputs by name. */
  const run = async (name, inputs) => {
    const [ort, model] = [await runtime(), await session(name)], feeds = {};
    for (const each of model.inputNames) {
      const {data, shape} = inputs[each];
      const type = data instanceof BigInt64Array ? "int64" : data instanceof Float64Array ? "float64" : "float32";
      feeds[each] = new ort.Tensor(type, data, shape);
    }
    const found = await model.run(feeds);
    return Object.fromEntries(model.outputNames.map(each => [each, {data: found[each].data, shape: found[each].dims}]));
  };

  /** Inputs with these decays, [rows, K], of which the first `length` rows are tokens. of: the operator. */
  const inputsOf = async (of, decays, length, seed, rows, {K}) => {
    const all = await seedOf(`${of.name}-${seed}`), inputs = {}, padded = from => {
      const data = new Float32Array(rows * K);
      data.set(from.subarray(0, length * K));
      return {data, shape: [1, rows, 1, K]};
    };
    let at = 0;
    for (const [name, shape] of Object.entries(of.drawn)) {
      const size = shape.reduce((a, b) => a * b, 1), own = all.subarray(at, at += size);
      inputs[name] = shape.length === 4 ? padded(own) : {data: own, shape};
    }
    inputs[of.decay] = padded(decays);
    inputs.length = {data: BigInt64Array.of(BigInt(length)), shape: []};
    return inputs;
  };

  const say = (text, said = {}) => text.replace(/\{(\w+)(?::[^}]*)?\}/g, (_, name) => said[name]);
  const listed = names => names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names.join("");
  const number = (x, digits = 4) => Number.isNaN(x) ? "NaN" : Math.abs(x) === Infinity ? (x < 0 ? "-inf" : "inf") : String(Number(x.toPrecision(digits)));
  const percent = share => share > 0 && share < 0.01 ? "<1%" : share > 0.99 && share < 1 ? ">99%" : `${Math.round(100 * share)}%`;
  const python = x => x === -Infinity ? 'float("-inf")' : Number.isInteger(x) ? `${x}.0` : String(x);
  const later = () => new Promise(done => setTimeout(done));

  // Pictures: cells are coloured, those that are not finite are hatched, few of them are pointed at.

  const colours = hex => { const all = []; for (let i = 0; i < hex.length; i += 6) all.push([0, 2, 4].map(n => parseInt(hex.slice(i + n, i + n + 2), 16))); return all; };

  const hatch = (context, colour, crossed, size) => {
    const tile = make("canvas", {width: size, height: size}), pen = tile.getContext("2d");
    pen.strokeStyle = colour;
    pen.lineWidth = size / 8;
    pen.beginPath();
    for (const by of [-size, 0, size]) {
      pen.moveTo(by, size); pen.lineTo(by + size, 0);
      if (crossed) { pen.moveTo(by, 0); pen.lineTo(by + size, size); }
    }
    pen.stroke();
    return context.createPattern(tile, "repeat");
  };

  /** A map of `value(row, column)`, coloured by `place` from 0 to 1; `empty` where there is nothing. */
  const draw = (canvas, {rows, columns, value, place, palette, empty = () => false}, about) => {
    const density = window.devicePixelRatio || 1, width = canvas.clientWidth * density, height = canvas.clientHeight * density;
    canvas.width = width;
    canvas.height = height;
    const context = canvas.getContext("2d"), cells = make("canvas", {width: columns, height: rows});
    const pen = cells.getContext("2d"), pixels = pen.createImageData(columns, rows), all = about.colours[palette];
    const lost = {nan: new Path2D(), inf: new Path2D()}, broken = new Set(), [nothing] = colours(about.empty.slice(1));
    const [across, down] = [width / columns, height / rows];
    const widened = (n, size, most) => {
      const wide = Math.max(size, LEAST * density);
      return [Math.min(Math.max(0, (n + 0.5) * size - wide / 2), most - wide), wide];
    };
    const rect = (row, column) => {
      const [[x, wide], [y, high]] = [widened(column, across, width), widened(row, down, height)];
      return [x, y, wide, high];
    };
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const x = value(row, column);
        const kind = Number.isNaN(x) ? "nan" : Number.isFinite(x) ? null : "inf";
        if (kind) { broken.add(column); lost[kind].rect(...rect(row, column)); continue; }
        const colour = empty(row, column) ? nothing : all[Math.min(255, Math.max(0, Math.floor(256 * place(x))))];
        pixels.data.set([...colour, 255], 4 * (row * columns + column));
      }
    }
    pen.putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(cells, 0, 0, width, height);
    for (const kind of ["nan", "inf"]) {
      context.fillStyle = about[kind].facecolor;
      context.fill(lost[kind]);
      context.fillStyle = hatch(context, about[kind].edgecolor, kind === "inf", 8 * density);
      context.fill(lost[kind]);
    }
    if (broken.size && broken.size < columns / 10) { // thin columns would be overlooked
      context.fillStyle = about.nan.edgecolor;
      for (const first of broken) {
        if (broken.has(first - 1)) continue;
        let last = first;
        while (broken.has(last + 1)) last++;
        const size = 5 * density, x = Math.min(Math.max((first + last + 1) / 2 * across, size), width - size);
        context.beginPath();
        context.moveTo(x - size, 0); context.lineTo(x + size, 0); context.lineTo(x, 1.6 * size);
        context.fill();
      }
    }
  };

  // A panel that computes, in the place of its player.

  class Computed {
    constructor(player, about) {
      Object.assign(this, {player, about, words: about.words, kind: player.data.name, id: player.id, of: operatorOf(player, about)});
      this.names = Object.keys(this.of.tensors);
      this.sketch = this.kind === "sketch-broken";
      const {knobs, frames} = player.data, at = frames[player.frame].at;
      const stands = Object.fromEntries(knobs.map(({name, values}, n) => [name, values[at[n]]]));
      const most = this.sketch ? about.sizes.sketch : about.sizes.T;
      this.first = {decay: Number(stands.decay), seed: Number(stands.seed) % about.sizes.seeds, T: Math.min(Number(stands.T ?? most), most)};
      if (!this.sketch) {
        const scheme = Object.keys(about.schemes).find(name => [name, about.schemes[name]].includes(stands.scheme)) ?? "none";
        Object.assign(this.first, {scheme, spike: stands.spike === "none" ? null : Number(stands.spike), at: Number(stands.at)});
      }
      this.setting = {...this.first};
      this.gates = this.result = null;
      this.build(most);
    }

    // The address: #panel=<its name>&here=yes&<knob>=<value>…

    address() {
      const said = new URLSearchParams({panel: this.id, here: "yes"});
      for (const [name, value] of Object.entries(this.setting)) if (value !== null) said.set(name, String(value).replace("Infinity", "inf"));
      return `#${said}`;
    }

    visit(said) {
      const asked = {...this.first};
      for (const name of Object.keys(asked)) {
        if (name === "spike") asked.spike = null;
        if (said.has(name)) asked[name] = name === "scheme" ? said.get(name) : Number(said.get(name).replace("inf", "Infinity"));
      }
      this.gates = null;
      this.tell("");
      const fits = Object.keys(asked).every(name => this.fits(name, asked[name]));
      if (fits) this.move(asked);
      else this.tell(this.player.words.elsewhere);
    }

    fits(name, value) {
      const {sizes, schemes} = this.about;
      const whole = (least, most) => Number.isInteger(value) && value >= least && value <= most;
      return {
        decay: () => value <= 0, spike: () => value === null || value <= 0, scheme: () => value in schemes,
        seed: () => whole(0, sizes.seeds - 1), T: () => whole(1, this.sketch ? sizes.sketch : sizes.T), at: () => whole(0, sizes.T - 1),
      }[name]();
    }

    // What there is on the page.

    build(most) {
      const {words, about, sketch} = this, {sizes} = about;
      const log = {to: x => x === 0 ? 0 : Math.min(1, Math.max(0.002, (Math.log10(-x) + 2) / 5)), from: p => p === 0 ? 0 : -(10 ** (5 * p - 2))};
      const even = {to: x => Math.min(1, x / -5), from: p => -5 * p};
      const whole = (least, most) => ({to: x => (x - least) / (most - least), from: p => Math.round(least + p * (most - least)), step: 1 / (most - least)});
      this.controls = {};
      const knobs = make("div", {className: "flakit-knobs"});
      knobs.append(this.slider("decay", sketch ? even : log));
      if (!sketch) {
        knobs.append(this.list("scheme", Object.entries(about.schemes)), this.slider("spike", log, true), this.slider("at", whole(0, sizes.T - 1)));
      }
      knobs.append(this.slider("T", whole(1, most)), this.slider("seed", whole(0, sizes.seeds - 1)));
      this.told = make("p", {className: "flakit-elsewhere", hidden: true, role: "status"});
      this.readout = make("div", {className: "flakit-readout", "aria-live": "polite"});
      this.onset = make("p", {className: "flakit-onset", "aria-live": "polite"});
      this.maps = make("div", {className: `flakit-maps flakit-maps-${this.kind}`});
      this.strip = make("div", {className: "flakit-strip", "aria-live": "polite", textContent: words.point});
      this.script = make("textarea", {className: "flakit-script", hidden: true, readOnly: true, rows: 10, spellcheck: false});
      this.script.setAttribute("aria-label", words.copy);
      const buttons = make("div", {className: "flakit-buttons"});
      this.buttons = {};
      for (const [name, pressed] of Object.entries({
        frames: () => this.leave(),
        reset: () => { this.gates = null; this.script.hidden = true; this.tell(""); this.move({...this.first}); },
        copy: () => this.copy("copy", this.python()),
        link: () => this.copy("link", new URL(this.address(), location).href),
      })) {
        this.buttons[name] = make("button", {type: "button", textContent: words[name], title: words[`${name} tip`] ?? ""});
        this.buttons[name].addEventListener("click", pressed);
        buttons.append(this.buttons[name]);
      }
      const note = make("p", {className: "flakit-note", textContent: say(words.note, {seeds: sizes.seeds - 1, T: most, K: sizes.K})});
      const takes = !sketch && this.of.name === about.first; // the model "headroom" is one operator's
      this.own = make("div", {className: "flakit-own", hidden: !takes});
      if (takes) window.flakitGates(this, {run, say, make, number, listed, later});
      this.root = make("div", {className: "flakit-computed"}, knobs, this.told, this.readout, this.onset, this.maps, this.strip, buttons, this.own, this.script, note);
      this.hidden = [...this.player.root.children];
      this.enter();
      new ResizeObserver(() => this.show()).observe(this.maps);
    }

    enter() {
      this.hidden.forEach(each => each.classList.add("flakit-aside"));
      this.player.root.append(this.root);
      this.player.root.classList.add("flakit-computing");
    }

    leave() {
      clearTimeout(this.settling);
      this.root.remove();
      this.hidden.forEach(each => each.classList.remove("flakit-aside"));
      this.player.root.classList.remove("flakit-computing");
      this.player.settle();
      this.player.buttons.here.focus();
    }

    row(name, kind, ...inputs) {
      const label = make("label", {htmlFor: `${this.id}-here-${name}`, textContent: this.words.knobs[name]});
      return make("div", {className: `flakit-knob flakit-knob-${kind}`}, label, ...inputs);
    }

    /** A slider without stops, and a box for any number. */
    slider(name, {to, from, step = 0.001}, optional = false) {
      const range = make("input", {id: `${this.id}-here-${name}`, type: "range", min: 0, max: 1, step});
      const box = make("input", {type: "text", inputMode: "text", "aria-label": `${this.words.knobs[name]}, as a number`});
      range.addEventListener("input", () => this.move({[name]: optional && Number(range.value) === 0 ? null : Number(from(Number(range.value)).toPrecision(6))}));
      box.addEventListener("change", () => {
        const value = optional && box.value === "none" ? null : box.value.trim() === "" ? NaN : Number(box.value.replace("inf", "Infinity"));
        if (this.fits(name, value)) this.move({[name]: value}); else this.stand();
      });
      this.controls[name] = {stand: value => {
        range.value = value === null ? 0 : to(value);
        box.value = value === null ? "none" : number(value, 6);
        range.setAttribute("aria-valuetext", box.value);
      }, inputs: [range, box]};
      return this.row(name, "slider", range, box);
    }

    list(name, options) {
      const input = make("select", {id: `${this.id}-here-${name}`}, ...options.map(([value, textContent]) => make("option", {value, textContent})));
      input.addEventListener("change", () => this.move({[name]: input.value}));
      this.controls[name] = {stand: value => { input.value = value; }, inputs: [input]};
      return this.row(name, "list", input);
    }

    stand() {
      for (const name of ["copy", "link"]) this.buttons[name].disabled = this.gates !== null; // neither has the file
      for (const [name, {stand, inputs}] of Object.entries(this.controls)) {
        stand(this.setting[name]);
        inputs.forEach(each => { each.disabled = this.gates !== null && ["decay", "spike", "at", "T"].includes(name) || name === "at" && this.setting.spike === null; });
      }
    }

    tell(text) { this.told.textContent = text; this.told.hidden = !text; }

    // Computing: the newest setting, one at a time.

    move(moved) {
      Object.assign(this.setting, moved);
      if (this.setting.spike !== undefined && this.setting.at >= this.setting.T) this.setting.at = this.setting.T - 1;
      this.stand();
      clearTimeout(this.settling);
      this.settling = setTimeout(() => this.settle(), SETTLED);
      return this.newest = this.compute();
    }

    async compute() {
      this.waiting = true;
      if (this.busy) return this.busy;
      this.busy = (async () => {
        try {
          while (this.waiting) {
            this.waiting = false;
            const begun = performance.now();
            this.result = await this.computed(this.setting);
            this.took = performance.now() - begun;
            this.true = null;
            this.onset.textContent = "";
            this.show();
            this.say();
            this.root.dataset.computed = JSON.stringify(this.setting);
          }
        } catch (error) {
          console.error("flakit:", error);
          this.tell(say(this.words.failed, {why: error.message}));
        } finally {
          this.busy = null;
        }
      })();
      return this.busy;
    }

    /** Decays of every token and channel: the reader's own, or one number with, perhaps, a token of its own. */
    decays({decay, spike, at}, {T, K} = this.about.sizes) {
      if (this.gates) return this.gates.decays;
      const all = new Float32Array(T * K).fill(decay);
      if (spike !== null && spike !== undefined) all.fill(spike, at * K, (at + 1) * K);
      return all;
    }

    async computed(setting) {
      const {sizes} = this.about, rows = this.sketch ? sizes.sketch : sizes.T, length = this.gates ? this.gates.length : setting.T;
      const inputs = await inputsOf(this.of, this.decays(setting), length, setting.seed, rows, sizes);
      const found = await run(this.sketch ? "sketch" : `run-${this.of.name}-${setting.scheme}`, inputs);
      return {...found, inputs, length, setting: {...setting}};
    }

    /** Values of a tensor's tokens alone. */
    values(name) {
      const {data, shape} = this.result[name];
      return shape.length === 4 && shape[1] > 1 ? data.subarray(0, this.result.length * shape[3]) : data;
    }

    lost(name) { const all = this.values(name); return all.reduce((n, x) => n + !Number.isFinite(x), 0) / all.length; }

    say() {
      const {words, names} = this, shares = Object.fromEntries(names.map(name => [name, this.lost(name)]));
      const bad = names.filter(name => shares[name]), good = names.filter(name => !shares[name]), lines = [];
      if (this.gates) lines.push(this.gates.said(this.setting.seed));
      if (!bad.length) lines.push(words["all fine"]);
      else if (!good.length) lines.push(words["all broken"]);
      else lines.push(say(words.broken[Math.min(bad.length, 2) - 1], {names: listed(bad)}) + say(words.others[Math.min(good.length, 2) - 1], {names: listed(good)}));
      if (this.sketch && bad.length) {
        const largest = this.values("true").reduce((most, x) => Math.max(most, Math.abs(x)), 0);
        lines.push(say(this.about.sketch.share, {share: percent(shares.dr), largest: number(largest, 3)}));
      }
      if (this.gates) lines.push(this.firstNaN());
      this.readout.textContent = lines.join("\n");
    }

    /** Tensors with a row for each token. */
    get alongTime() { return this.names.filter(name => this.result[name].shape.length === 4); }

    /** The first token of each tensor whose row is not finite. */
    firstNaN() {
      const {K} = this.about.sizes, first = this.alongTime.map(name => [name, this.values(name).findIndex(x => !Number.isFinite(x))]);
      const places = first.filter(([, n]) => n >= 0).map(([name, n]) => `${name} ${this.gates.token + Math.floor(n / K)}`);
      return places.length ? say(this.words["first NaN"], {places: listed(places)}) : this.words["no NaN"];
    }

    // Pictures.

    /** What is drawn: a map of each tensor with its tokens across, and of one chunk's scores. */
    drawn() {
      const {about, words, result, sketch} = this, {K, chunk} = about.sizes, T = result.length;
      const across = (name, title, look) => ({name, title, rows: K, columns: T, value: (row, column) => result[name].data[column * K + row], ...look});
      if (sketch) {
        const largest = this.values("true").reduce((most, x) => Math.max(most, Math.abs(x)), 0) || 1;
        const look = {palette: "signed", place: x => (x / largest + 1) / 2, note: say(words.colours, {largest: number(largest, 3)})};
        return [across("dr", about.sketch.computed, look), across("true", about.sketch.true, look)];
      }
      const look = {palette: "magnitude", place: x => (Math.log10(Math.abs(x)) + 4) / 6, note: words.sizes};
      const maps = this.alongTime.map(name => {
        const share = this.lost(name);
        return across(name, `${name}: ${share ? say(words.lost, {share: percent(share)}) : words.fine}`, look);
      });
      const begin = this.gates?.token ?? 0, A = result.A.data, chunks = Math.ceil(T / chunk), bad = n => A.subarray(n * chunk * chunk, (n + 1) * chunk * chunk).some(x => !Number.isFinite(x));
      const index = [...Array(chunks).keys()].find(bad) ?? 0, size = Math.min(chunk, T - index * chunk);
      maps.push({name: "A", title: say(words.scores[this.of.name], {a: begin + index * chunk, b: begin + index * chunk + size - 1}), rows: size, columns: size, first: begin + index * chunk,
        value: (row, column) => A[(index * chunk + row) * chunk + column], empty: (row, column) => column > row, ...look});
      return maps;
    }

    show() {
      if (!this.result || !this.root.isConnected) return;
      const drawn = this.shown = this.drawn();
      if (this.maps.children.length !== drawn.length) {
        this.maps.replaceChildren(...drawn.map((each, n) => {
          const canvas = make("canvas", {tabIndex: 0, role: "img"});
          canvas.addEventListener("pointermove", event => this.point(n, event.offsetX / canvas.clientWidth, event.offsetY / canvas.clientHeight));
          canvas.addEventListener("click", event => this.point(n, event.offsetX / canvas.clientWidth, event.offsetY / canvas.clientHeight));
          canvas.addEventListener("pointerleave", () => { this.strip.textContent = this.words.point; });
          canvas.addEventListener("keydown", event => this.step(n, event));
          return make("figure", {className: `flakit-map flakit-map-${each.name}`}, make("figcaption"), canvas);
        }), make("p", {className: "flakit-note flakit-legend"}));
      }
      const figures = [...this.maps.querySelectorAll("figure")];
      drawn.forEach((each, n) => {
        const [title, canvas] = figures[n].children;
        title.textContent = each.title;
        canvas.setAttribute("aria-label", `${each.title}; ${each.name === "A" ? this.words.pairs : this.words.axes}`);
        draw(canvas, each, this.about);
      });
      this.maps.lastChild.textContent = `${drawn[0].note}; ${this.words.axes}.`;
    }

    step(n, event) {
      const by = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
      if (!by) return;
      event.preventDefault();
      const {rows, columns} = this.shown[n], within = (x, most) => Math.min(Math.max(x, 0), most - 1);
      const [map, row, column] = this.cell ?? [n, 0, -1];
      this.cell = [n, within((map === n ? row : 0) + by[0], rows), within((map === n ? column : -1) + by[1], columns)];
      this.tellCell();
    }

    point(n, x, y) {
      const {rows, columns} = this.shown[n];
      if (x < 0 || x >= 1 || y < 0 || y >= 1) return;
      this.cell = [n, Math.floor(y * rows), Math.floor(x * columns)];
      this.tellCell();
    }

    async tellCell() {
      const cell = this.cell, [n, row, column] = cell, {words} = this, map = this.shown[n], got = number(map.value(row, column));
      if (map.name === "A") {
        this.strip.textContent = say(words.score, {i: map.first + row, j: map.first + column, got});
        return;
      }
      const result = this.result, {K} = this.about.sizes;
      this.true ??= this.sketch ? Promise.resolve({dr: result.true, true: result.true}) : run(`truth-${this.of.name}`, result.inputs);
      const exact = await this.true;
      if (this.cell !== cell || this.result !== result) return;
      const name = map.name === "true" ? "dr" : map.name;
      const said = {name, t: (this.gates?.token ?? 0) + column, column: this.of.tensors[name], c: row, got, true: number(exact[map.name].data[column * K + row])};
      this.strip.textContent = say(words.cell, said);
    }

    // What follows when the knobs stand still: the address, and where the decay breaks the first tensor.

    async settle() {
      if (!this.root.isConnected) return;
      history.replaceState(history.state, "", this.gates ? location.href.split("#")[0] : this.address());
      if (this.gates) return;
      await this.busy;
      const asked = JSON.stringify(this.setting), {setting, words} = this;
      const knob = setting.spike === null || this.sketch ? words["per token"] : say(words["of token"], {at: setting.at});
      const found = await this.measured(setting, () => this.waiting || this.busy || JSON.stringify(this.setting) !== asked || !this.root.isConnected);
      if (!found) return;
      const said = {which: this.of.decay, most: 1000, names: listed(found.names ?? []), at: number(found.at, 5), knob};
      this.onset.textContent = [say(found.names ? words.first[Math.min(found.names.length, 2) - 1] : words.nothing, said), this.of.bound].join(" ").trim();
    }

    /** By halving: the smallest size of the decay (of one token's where it has its own) that breaks a tensor. */
    async measured(setting, stale) {
      const names = this.alongTime;
      const broken = async size => {
        const along = setting.spike === null || this.sketch ? {decay: -size, spike: null} : {decay: 0, spike: -size};
        const result = await this.computed({...setting, ...along});
        return names.filter(name => { const {data, shape} = result[name]; return data.subarray(0, result.length * shape[3]).some(x => !Number.isFinite(x)); });
      };
      let [low, high] = [1e-3, 1e3], last = await broken(high);
      if (!last.length) return stale() ? null : {at: Infinity};
      while (high / low > 1 + 1e-4) {
        if (stale()) return null;
        const size = Math.sqrt(low * high), found = await broken(size);
        if (found.length) [high, last] = [size, found]; else low = size;
        await later();
      }
      return stale() ? null : {at: high, names: last};
    }

    // Buttons.

    python() {
      const {setting} = this, scripts = this.sketch ? {plain: this.about.script} : this.of.scripts, spiked = setting.spike !== null && setting.spike !== undefined;
      const said = {...setting, decay: python(setting.decay), spike: spiked ? python(setting.spike) : ""};
      return (spiked ? scripts.spike : scripts.plain).replace(/<(\w+)>/g, (_, name) => said[name]);
    }

    async copy(name, text) {
      this.script.value = text;
      this.script.hidden = false;
      try {
        await navigator.clipboard.writeText(text);
        this.buttons[name].textContent = this.words.copied;
        setTimeout(() => { this.buttons[name].textContent = this.words[name]; }, 1500);
      } catch {
        this.script.select();
      }
    }
  }

  // The way from a player to here.

  const begin = async player => {
    const about = await read("about");
    about.colours ??= {signed: colours(about.palettes.signed), magnitude: colours(about.palettes.magnitude)};
    await runtime();
    player.computed ??= new Computed(player, about);
    if (!player.computed.root.isConnected) player.computed.enter();
    return player.computed;
  };

  const can = ({data}) => PANELS.includes(data.name);

  /** The operator of a panel: what its knob says where it begins, or the one of the sketch. */
  const operatorOf = ({data}, {operators, first}) => {
    const knob = data.knobs.findIndex(each => each.name === "op");
    const label = knob < 0 ? operators[first].label : data.knobs[knob].values[data.frames[data.start].at[knob]];
    const name = Object.keys(operators).find(each => operators[each].label === label);
    return {name, ...operators[name]};
  };

  window.flakitCompute = {
    /** A button of a player's, where its panel can be computed; and there at once, if the address asks for it. */
    async offer(player) {
      if (!can(player)) return;
      const {words} = await read("about");
      const button = make("button", {type: "button", className: "flakit-here", textContent: words.here, title: say(words["here tip"], words)});
      button.addEventListener("click", async () => { (await this.enter(player))?.move({}); });
      player.buttons.here = button;
      player.buttons.link.before(button);
      if (player.asked) this.visit(player, player.asked);
    },

    async enter(player) {
      const {here} = player.buttons, {words} = await read("about");
      player.stop();
      here.textContent = words.loading;
      here.disabled = true;
      try {
        return await begin(player);
      } catch (error) {
        console.warn("flakit:", error);
        player.elsewhere.textContent = say(words.failed, {why: error.message});
        player.elsewhere.hidden = false;
      } finally {
        here.textContent = words.here;
        here.disabled = false;
      }
    },

    /** Whether an address asks for a panel that computes; then it does. */
    visit(player, said) {
      if (!said.has("here") || !can(player)) return false;
      player.asked = said;
      if (player.buttons.here) this.enter(player).then(computed => computed?.visit(said));
      return true;
    },
  };
})();
