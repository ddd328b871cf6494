// Plays the frames that docs/frames.py has recorded of a panel: its knobs, its readout, its picture, the arithmetic of
// its cells. Nothing is computed here: a knob that is moved leads to another frame, or there is none to lead to.

(() => {
  const FOLDER = new URL("frames/", document.currentScript.src).href;
  const STEPS = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
  const NEAR = 3; // stops on either side whose pictures are read ahead
  const CALM = 1500; // ms a step while playing, at least, where less motion is asked for
  const SETTLED = 400; // ms after the last move until the address says where a panel stands
  const PHONE = window.matchMedia("(max-width: 480px)"); // as in player.css: pictures are cut into pieces
  const ICONS = {
    play: "M4 2.5v11l9.5-5.5z",
    pause: "M4 2.5h3v11H4zM9 2.5h3v11H9z",
    back: "M12.5 2.5v11L5.5 8zM3 2.5h2v11H3z",
    on: "M3.5 2.5v11L10.500 8zM11 2.5h2v11h-2z",
  };

  // Scripts in place of requests for data, which a page that was opened as a file may not make: what one says arrives in
  // a map, under its path.
  const reader = (folder, arrived) => {
    const scripts = new Map();
    return path => {
      if (!scripts.has(path)) {
        scripts.set(path, new Promise((done, failed) => {
          const script = document.createElement("script");
          script.src = folder + path;
          script.onload = () => done(arrived.get(path));
          script.onerror = () => { scripts.delete(path); failed(new Error(path)); };
          document.head.append(script);
        }));
      }
      return scripts.get(path);
    };
  };
  const arrived = new Map(), read = reader(FOLDER, arrived);
  window.flakitFrames = (id, data) => arrived.set(`${id}.js`, data);
  window.flakitMore = (id, n, packed) => arrived.set(`${id}/more-${n}.js`, packed);

  const unpacked = async (packed, format) => {
    const bytes = Uint8Array.from(atob(packed), each => each.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream(format));
    return new Response(stream).arrayBuffer();
  };

  const make = (tag, properties = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name in made && name !== "list") made[name] = value; else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  };
  window.flakitPage = {make, reader, unpacked}; // compute.js has them from here

  const icon = name => {
    const drawn = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    drawn.setAttribute("viewBox", "0 0 16 16");
    drawn.setAttribute("aria-hidden", "true");
    const path = document.createElementNS(drawn.namespaceURI, "path");
    path.setAttribute("d", ICONS[name]);
    drawn.append(path);
    return drawn;
  };

  class Player {
    constructor(root, id, data) {
      Object.assign(this, {root, id, data, words: data.words});
      this.places = new Map(data.frames.map((frame, n) => [frame.at.join(), n]));
      this.images = new Map();
      this.packs = new Map();
      this.frame = data.start;
      this.still = root.querySelector("img.flakit-picture");
      this.picked = this.pointed = this.kept = this.timer = this.moved = null;
      this.build();
      this.show(data.start, true);
      this.visit();
      addEventListener("hashchange", () => this.visit());
      PHONE.addEventListener("change", () => this.lay());
      window.flakitCompute?.offer(this); // compute.js, on a site that computes
    }

    // The address: #panel=<its name>&<knob>=<value>…, each value as it is written beside its knob.

    /** The present setting as the last part of an address. */
    address() {
      const {knobs, frames} = this.data, said = new URLSearchParams({panel: this.id});
      knobs.forEach(({name, values}, n) => { if (values.length > 1) said.set(name, values[frames[this.frame].at[n]]); });
      return `#${said}`;
    }

    /** Go where the address says, if it speaks of this panel; what was not recorded is told, not passed over. */
    visit() {
      const said = new URLSearchParams(location.hash.slice(1));
      if (said.get("panel") !== this.id || window.flakitCompute?.visit(this, said)) return;
      const {knobs, frames, start} = this.data;
      const at = knobs.map(({name, values}, n) => said.has(name) ? values.indexOf(said.get(name)) : frames[start].at[n]);
      const unknown = [...said.keys()].filter(name => name !== "panel" && !knobs.some(knob => knob.name === name));
      const n = unknown.length ? undefined : this.find(at);
      this.stop();
      this.go(n);
      this.elsewhere.hidden = n !== undefined;
    }

    /** Have the address say where the panel stands, once it stands still: a reload or a copy of it comes back here. */
    settle() {
      clearTimeout(this.moved);
      this.moved = setTimeout(() => history.replaceState(history.state, "", this.address()), SETTLED);
    }

    // Where a knob leads.

    /** The frame of a setting given as the place of each knob's value, or undefined. */
    find(at) { return this.places.get(at.join()); }

    with(n, moved) {
      const at = this.data.frames[n].at.slice();
      for (const [knob, value] of Object.entries(moved)) at[knob] = value;
      return this.find(at);
    }

    /** The frame that moving one knob leads to. */
    after(n, knob, value) {
      const follows = this.data.frames[n].moves?.[knob]?.[value];
      return follows === undefined ? this.with(n, {[knob]: value}) : follows < 0 ? undefined : follows;
    }

    offered(n, knob) {
      const offers = this.data.frames[n].offers;
      return (offers === undefined ? null : this.data.offers[offers][knob]) ?? this.data.knobs[knob].values.map((_, i) => i);
    }

    /** The values of a knob that lead somewhere from a frame, and its own. */
    stops(n, knob) {
      const at = this.data.frames[n].at[knob];
      return this.offered(n, knob).filter(value => value === at || this.after(n, knob, value) !== undefined);
    }

    // What there is on the page.

    build() {
      const {data, words, root} = this;
      this.controls = data.knobs.map((knob, n) => this.control(knob, n));
      const those = shown => this.controls.filter((each, n) => each && data.knobs[n].shown === shown).map(each => each.row);
      const knobs = make("div", {className: "flakit-knobs"}, ...those(true));
      const others = those(false); // under "more"
      this.more = make("div", {className: "flakit-more", hidden: true}, ...others);
      this.more.prepend(make("p", {className: "flakit-locally", textContent: words.folded}));
      const row = make("div", {className: "flakit-presets", role: "group", "aria-label": words.presets});
      if (data.play) row.append(this.player());
      for (const preset of data.presets) {
        const button = make("button", {type: "button", title: preset.tip, textContent: preset.label});
        button.addEventListener("click", () => { this.stop(); this.go(this.with(this.frame, preset.moved) ?? preset.frame); });
        row.append(button);
      }
      for (const label of data.runs) {
        row.append(make("button", {type: "button", disabled: true, title: words.locally, textContent: label}));
      }
      this.elsewhere = make("p", {className: "flakit-elsewhere", hidden: true, role: "status", textContent: words.elsewhere});
      this.readout = make("div", {className: "flakit-readout", "aria-live": "polite"});
      this.still.decoding = "sync";
      this.still.setAttribute("role", "img");
      this.strip = make("div", {className: "flakit-strip", "aria-live": "polite"});
      this.window = make("div", {className: "flakit-window"});
      const picture = make("div", {className: "flakit-picture-box"}, this.window, this.strip);
      this.pinned = make("figure", {className: "flakit-pinned", hidden: true});
      const pictures = make("div", {className: "flakit-pictures"}, picture, this.pinned);
      this.script = make("textarea", {className: "flakit-script", hidden: true, readOnly: true, rows: 10, spellcheck: false});
      this.buttons = {};
      const buttons = make("div", {className: "flakit-buttons"});
      for (const [name, pressed] of Object.entries({
        reset: () => { this.stop(); this.script.hidden = true; this.go(data.start); },
        pin: () => this.pin(),
        copy: async () => this.copy("copy", (await this.cells(this.frame)).script),
        link: () => this.copy("link", new URL(this.address(), location).href),
        save: () => make("a", {href: this.still.src, download: `${this.id}.webp`, target: "_blank"}).click(),
        more: () => { this.more.hidden = !this.more.hidden; this.buttons.more.setAttribute("aria-expanded", !this.more.hidden); },
        enlarge: () => this.enlarge(),
      })) {
        const button = make("button", {type: "button", title: words[`${name} tip`], textContent: words[name]});
        button.addEventListener("click", pressed);
        this.buttons[name] = button;
        if (name === "enlarge") picture.prepend(button); else buttons.append(button);
      }
      this.buttons.enlarge.className = "flakit-enlarge";
      this.buttons.more.setAttribute("aria-expanded", "false");
      this.buttons.more.hidden = !others.length;
      const note = make("p", {className: "flakit-note", innerHTML: data.note});
      root.replaceChildren(knobs, ...(row.children.length ? [row] : []), this.elsewhere, this.readout, pictures, buttons, this.more, this.script, note);
      root.classList.add("flakit-live");
      this.point();
      for (const event of ["pointerenter", "focusin"]) root.addEventListener(event, () => this.ahead(), {once: true});
    }

    control(knob, n) {
      if (knob.hidden) return null;
      const id = `${this.id}-${knob.name}`;
      const label = make("label", {htmlFor: id, textContent: knob.label});
      const said = make("output", {htmlFor: id});
      let input;
      if (knob.kind === "list") {
        input = make("select", {id}, ...knob.values.map((each, value) => make("option", {value, textContent: each})));
        input.addEventListener("change", () => this.move(n, Number(input.value)));
      } else if (knob.kind === "box") {
        input = make("input", {id, type: "checkbox"});
        input.addEventListener("change", () => this.move(n, knob.values.indexOf(input.checked ? "True" : "False")));
      } else if (knob.kind === "number") {
        input = make("input", {id, type: "text"});
      } else {
        input = make("input", {id, type: "range", min: 0, step: 1});
        input.addEventListener("input", () => this.move(n, this.controls[n].stops[input.value]));
      }
      const row = make("div", {className: `flakit-knob flakit-knob-${knob.kind}`}, label, input);
      if (knob.kind === "slider") row.append(said);
      return {row, input, said, stops: null};
    }

    /** Every knob as it stands at the present frame. */
    stand() {
      const frame = this.data.frames[this.frame];
      this.controls.forEach((control, n) => {
        if (!control) return;
        const {input, row, said} = control, knob = this.data.knobs[n], at = frame.at[n];
        const stops = this.stops(this.frame, n), fixed = stops.length < 2;
        input.disabled = fixed;
        row.classList.toggle("flakit-fixed", fixed);
        row.title = fixed ? this.words.locally : "";
        control.stops = stops;
        if (knob.kind === "list") {
          const offered = new Set(this.offered(this.frame, n));
          Array.from(input.options).forEach((option, value) => {
            option.hidden = !offered.has(value);
            option.disabled = !stops.includes(value);
          });
          input.value = at;
        } else if (knob.kind === "box") {
          input.checked = knob.values[at] === "True";
        } else if (knob.kind === "number") {
          input.value = knob.values[at];
        } else {
          // One that cannot be moved stands where it would stand among all of its stops.
          input.max = (fixed ? knob.stops : stops.length) - 1;
          input.value = fixed ? knob.places[at] : stops.indexOf(at);
          input.setAttribute("aria-valuetext", knob.values[at]);
          said.textContent = knob.values[at];
        }
      });
    }

    move(knob, value) {
      if (value === undefined || value < 0) return;
      this.stop();
      this.go(this.after(this.frame, knob, value));
    }

    go(n) {
      if (n === undefined) { this.stand(); return; }
      if (n === this.frame) return;
      this.elsewhere.hidden = true;
      this.show(n);
      this.settle();
    }

    // Pictures.

    /** A picture in pieces one below the other: on a phone those that it was cut into, elsewhere one piece. Each is an
        opening onto a copy of the whole picture, in which all places are as they are in the whole. */
    openings(still, picture) {
      const {pixels, pieces, looks} = this.data, [wide, high] = pixels[picture];
      const cut = PHONE.matches && !this.large ? pieces[looks[picture]] : [[0, 0, wide, high, wide]];
      return cut.map(([left, top, width, height, room], n) => {
        const copy = n ? make("img", {className: "flakit-picture", src: still.src, alt: "", decoding: "sync"}) : still;
        const frame = make("div", {className: "flakit-frame"}, copy), piece = make("div", {className: "flakit-piece"}, frame);
        Object.assign(frame.style, {width: `${100 * wide / width}%`, left: `${-100 * left / width}%`, top: `${-100 * top / height}%`});
        piece.style.aspectRatio = `${width} / ${height}`;
        if (cut.length > 1) piece.style.width = `${100 * width / room}%`;
        else piece.style.maxWidth = `calc(var(--larger, 1) * ${wide}px)`;
        return piece;
      });
    }

    lay() {
      const {picture} = this.data.frames[this.frame];
      this.laid = [this.data.looks[picture], ...this.data.pixels[picture]].join();
      this.window.replaceChildren(...this.openings(this.still, picture));
      this.say();
    }

    image(n) {
      const picture = this.data.frames[n].picture;
      if (!this.images.has(picture)) {
        this.images.set(picture, make("img", {src: `${FOLDER}${this.id}/${picture}.webp`}));
      }
      return this.images.get(picture);
    }

    /** Show a frame: the knobs at once, words and picture together, as soon as it is decoded; only the newest one. */
    async show(n, first = false) {
      const frame = this.data.frames[n], image = this.image(n);
      this.frame = n;
      this.stand();
      try {
        if (!first) await image.decode();
      } catch {
        this.images.delete(frame.picture);
        if (this.frame === n) this.readout.textContent = this.words.missing;
        return;
      }
      if (this.frame !== n) return;
      const [width, height] = this.data.pixels[frame.picture];
      for (const each of [this.still, ...this.window.querySelectorAll("img")]) each.src = image.src;
      this.still.width = width;
      this.still.height = height;
      this.still.alt = this.data.texts[frame.alt];
      this.still.setAttribute("aria-label", this.still.alt);
      this.readout.innerHTML = this.data.texts[frame.readout];
      this.readout.style.minHeight = `${this.tall = Math.max(this.tall ?? 0, this.readout.offsetHeight)}px`;
      this.keep();
      if (this.laid === [this.data.looks[frame.picture], width, height].join()) this.say(); else this.lay();
      this.root.dataset.frame = n;
      if (!first) this.ahead(true);
    }

    /** Read the pictures that the next steps may show; once a knob was moved, the others too, when there is time. */
    ahead(all = false) {
      const next = [];
      this.controls.forEach((control, n) => {
        if (!control || control.input.disabled) return;
        const here = control.stops.indexOf(this.data.frames[this.frame].at[n]);
        control.stops.forEach((value, place) => {
          const to = this.after(this.frame, n, value);
          if (to !== undefined) next.push([Math.abs(place - here), to]);
        });
      });
      next.push(...this.data.presets.map(each => [NEAR, each.frame]));
      next.sort((a, b) => a[0] - b[0]);
      for (const [away, n] of next) if (away <= NEAR) this.image(n);
      const rest = all ? next.filter(([away]) => away > NEAR).map(([, n]) => n) : [];
      const here = this.frame, idle = window.requestIdleCallback ?? (each => setTimeout(each, 50));
      const some = () => {
        for (const n of rest.splice(0, 4)) this.image(n);
        if (rest.length && this.frame === here) idle(some);
      };
      idle(some);
    }

    // Play.

    player() {
      const {words} = this;
      const button = (name, pressed) => {
        const made = make("button", {type: "button", title: words[name]}, icon(name));
        made.setAttribute("aria-label", words[name]);
        made.addEventListener("click", pressed);
        return made;
      };
      this.playing = button("play", () => this.timer ? this.stop() : this.play());
      const back = button("back", () => { this.stop(); this.step(-1); });
      const on = button("on", () => { this.stop(); this.step(1); });
      return make("span", {className: "flakit-play"}, this.playing, back, on);
    }

    /** The frames that play goes through from here, where this one is among them, and where it begins and stops. */
    way() {
      const {play} = this.data;
      if (play.knob !== undefined) {
        const stops = this.stops(this.frame, play.knob);
        const way = stops.map(value => this.after(this.frame, play.knob, value));
        const here = stops.indexOf(this.data.frames[this.frame].at[play.knob]);
        way[here] = this.frame;
        return {way, here, passes: [0, way.length]};
      }
      const {frames, passes} = play.ways.find(each => each.frames.includes(this.frame)) ?? {frames: [], passes: []};
      return {way: frames, here: frames.indexOf(this.frame), passes};
    }

    step(by) {
      const {way, here} = this.way();
      this.go(way[Math.min(Math.max(here + by, 0), way.length - 1)]);
    }

    play() {
      const {way, here, passes} = this.way();
      // At the end of a pass the next one begins, or this one again.
      if (passes.includes(here + 1)) this.go(way[(here + 1) % way.length]);
      const calm = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
      const pause = Math.max(this.data.play.milliseconds, calm ? CALM : 0);
      this.readout.setAttribute("aria-live", "off");
      this.timer = setInterval(() => {
        const {way, here, passes} = this.way();
        if (passes.includes(here + 1) || way[here + 1] === undefined) this.stop();
        else this.go(way[here + 1]);
      }, pause);
      this.face("pause");
    }

    stop() {
      if (!this.timer) return;
      clearInterval(this.timer);
      this.timer = null;
      this.readout.setAttribute("aria-live", "polite");
      this.face("play");
    }

    face(name) {
      this.playing.replaceChildren(icon(name));
      this.playing.title = this.words[name];
      this.playing.setAttribute("aria-label", this.words[name]);
    }

    // Cells of the picture.

    get maps() { return this.data.layouts[this.data.frames[this.frame].layout]; }

    get cell() { return this.pointed ?? this.picked; }

    point() {
      const {still} = this;
      let waiting = null;
      const at = event => {
        if (!event.target.matches("img")) return null;
        const box = event.target.getBoundingClientRect();
        return this.hit((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
      };
      this.window.addEventListener("pointermove", event => {
        if (event.pointerType === "touch") return;
        const first = waiting === null;
        waiting = event;
        if (first) requestAnimationFrame(() => { this.pointed = at(waiting); waiting = null; this.say(); });
      });
      this.window.addEventListener("pointerleave", () => { this.pointed = null; this.say(); });
      this.window.addEventListener("click", event => {
        if (!this.maps.length || !event.target.matches("img")) return;
        still.focus({preventScroll: true});
        this.pick(at(event));
      });
      still.addEventListener("keydown", event => {
        if (!this.maps.length) return;
        if (STEPS[event.key]) this.pick(this.beside(...STEPS[event.key]));
        else if (event.key === "Escape") this.pick(null);
        else return;
        event.preventDefault();
        event.stopPropagation();
      });
      still.addEventListener("focus", () => this.maps.length && this.cells(this.frame).catch(() => {}));
    }

    pick(cell) {
      this.picked = cell;
      this.pointed = null;
      this.say();
    }

    /** The recorded cell at a place, or the one nearest to it on its map. */
    hit(x, y) {
      for (const [map, {rows, columns, ...each}] of this.maps.entries()) {
        const row = line(each.y, rows, y), column = line(each.x, columns, x);
        if (row !== null && column !== null) {
          return {map, row: nearest(each.some_rows, row), column: nearest(each.some_columns, column)};
        }
      }
      return null;
    }

    /** The next recorded cell in a direction, staying on the map; the first one of the first map at first. */
    beside(right, down) {
      if (!this.picked) return {map: 0, row: 0, column: 0};
      const {map, row, column} = this.picked, {rows, columns, some_rows, some_columns} = this.maps[map];
      return {map, row: next(some_rows, rows, row, down), column: next(some_columns, columns, column, right)};
    }

    /** A picked cell stays from frame to frame where it is still there. */
    keep() {
      const still = cell => {
        const map = cell && this.maps[cell.map];
        if (!map || cell.row >= map.rows || cell.column >= map.columns) return null;
        return {map: cell.map, row: nearest(map.some_rows, cell.row), column: nearest(map.some_columns, cell.column)};
      };
      this.picked = still(this.picked);
      this.pointed = still(this.pointed);
    }

    /** The words of all recorded cells of a frame, what lights up with each, and its script. */
    async cells(n) {
      let pack = 0, first = 0;
      while (n >= first + this.data.packs[pack]) first += this.data.packs[pack++];
      if (!this.packs.has(pack)) this.packs.set(pack, read(`${this.id}/more-${pack}.js`).then(async packed => {
        return JSON.parse(new TextDecoder().decode(await unpacked(packed, "deflate-raw")));
      }));
      const all = await this.packs.get(pack), [words, beside, script] = all.frames[n - first];
      return {words: words.map(each => all.words[each]), beside: all.beside[beside], script};
    }

    async say() {
      const cell = this.cell, n = this.frame, points = this.maps.length > 0;
      this.strip.hidden = !points;
      this.still.tabIndex = points ? 0 : -1;
      this.window.classList.toggle("flakit-points", points);
      if (!cell) {
        delete this.strip.dataset.waiting;
        this.strip.textContent = this.words.point;
        this.light([]);
        return;
      }
      const box = (map, row, column) => {
        const {rows, columns, x, y} = this.maps[map];
        return [...span(x, columns, column), ...span(y, rows, row)];
      };
      const {map, row, column} = cell;
      const lines = [["line", ...box(map, row, -1)], ["line", ...box(map, -1, column)]];
      const own = ["cell", ...box(map, row, column)];
      this.light([...lines, own]);
      let found = null;
      this.strip.dataset.waiting = "yes";
      try {
        found = await this.cells(n);
      } catch {
        // said below
      }
      if (this.frame !== n || !same(this.cell, cell)) return;
      delete this.strip.dataset.waiting;
      if (!found) {
        this.strip.textContent = window.DecompressionStream ? this.words.missing : this.words.old;
        return;
      }
      const at = this.index(cell), others = [], beside = found.beside[at];
      for (let i = 0; i < beside.length; i += 3) others.push(["same", ...box(...beside.slice(i, i + 3))]);
      this.strip.textContent = found.words[at];
      this.light([...lines, ...others, own]);
    }

    /** Where the words of a cell stand among those of its frame. */
    index({map, row, column}) {
      let before = 0;
      const count = (some, all) => some ? some.length : all;
      const place = (some, n) => some ? some.indexOf(n) : n;
      for (const each of this.maps.slice(0, map)) before += count(each.some_rows, each.rows) * count(each.some_columns, each.columns);
      const {columns, some_rows, some_columns} = this.maps[map];
      return before + place(some_rows, row) * count(some_columns, columns) + place(some_columns, column);
    }

    light(places) {
      this.window.querySelectorAll(".flakit-lit").forEach(each => each.remove());
      for (const frame of this.window.querySelectorAll(".flakit-frame")) {
        for (const [look, x, width, y, height] of places) {
          const lit = make("div", {className: `flakit-lit flakit-lit-${look}`});
          Object.assign(lit.style, {left: `${100 * x}%`, width: `${100 * width}%`, top: `${100 * y}%`, height: `${100 * height}%`});
          frame.append(lit);
        }
      }
    }

    // Buttons.

    pin() {
      const {words} = this, kept = !this.pinned.hidden;
      this.pinned.hidden = kept;
      this.root.classList.toggle("flakit-pinning", !kept);
      if (kept) {
        this.pinned.replaceChildren();
      } else {
        const {picture, alt, text} = this.data.frames[this.frame], [width, height] = this.data.pixels[picture];
        const say = each => words.pinned.replace("{text}", each);
        const still = make("img", {className: "flakit-picture", src: this.still.src, width, height, alt: say(this.data.texts[alt])});
        const pinned = make("div", {className: "flakit-window"}, ...this.openings(still, picture));
        this.pinned.append(pinned, make("figcaption", {textContent: say(this.data.texts[text])}));
      }
      this.buttons.pin.textContent = words[kept ? "pin" : "unpin"];
      this.buttons.pin.title = words[kept ? "pin tip" : "unpin tip"];
    }

    /** Text to the clipboard, which the button then says. */
    async copy(name, text) {
      this.script.value = text;
      this.script.setAttribute("aria-label", this.words[name]);
      this.script.hidden = false; // stays, for browsers that let nobody write to the clipboard
      try {
        await navigator.clipboard.writeText(text);
        this.buttons[name].textContent = this.words.copied;
        setTimeout(() => { this.buttons[name].textContent = this.words[name]; }, 1500);
      } catch {
        this.script.select();
      }
    }

    enlarge() {
      this.large = this.root.classList.toggle("flakit-large");
      const name = this.large ? "fit" : "enlarge";
      this.buttons.enlarge.textContent = this.words[name];
      this.buttons.enlarge.title = this.words[`${name} tip`];
      if (this.large) this.window.tabIndex = 0; else this.window.removeAttribute("tabindex");
      this.lay();
    }
  }

  // Lines of a map: where they begin and the last one ends, or, where all are as wide, both ends alone.

  const edge = (edges, count, n) => edges.length > 2 ? edges[n] : edges[0] + (edges[1] - edges[0]) * n / count;

  /** Begin and width of a line; of all of them for -1. */
  const span = (edges, count, n) => {
    const from = edge(edges, count, n < 0 ? 0 : n), to = edge(edges, count, n < 0 ? count : n + 1);
    return [Math.min(from, to), Math.abs(to - from)];
  };

  const line = (edges, count, at) => {
    for (let n = 0; n < count; n++) {
      const [from, width] = span(edges, count, n);
      if (from <= at && at < from + width) return n;
    }
    return null;
  };

  const nearest = (some, n) => some ? some.reduce((a, b) => Math.abs(b - n) < Math.abs(a - n) ? b : a) : n;

  const next = (some, count, n, by) => {
    const last = (some ? some.length : count) - 1, at = Math.min(Math.max((some ? some.indexOf(n) : n) + by, 0), last);
    return some ? some[at] : at;
  };

  const same = (a, b) => a && b && a.map === b.map && a.row === b.row && a.column === b.column;

  const begin = async root => {
    const id = root.dataset.frames;
    try {
      const data = await read(`${id}.js`);
      root.player = new Player(root, id, data);
    } catch (error) {
      root.classList.add("flakit-missing"); // the first picture and its words stay
      console.error(`flakit: no frames of ${id}`, error);
    }
  };

  const start = () => {
    const seen = new IntersectionObserver(entries => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        seen.unobserve(entry.target);
        begin(entry.target);
      }
    }, {rootMargin: "600px"});
    document.querySelectorAll(".flakit-player[data-frames]").forEach(root => seen.observe(root));
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start); else start();
})();
