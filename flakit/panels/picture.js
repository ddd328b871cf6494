// The picture of a panel: PNG bytes from the kernel, cells that can be pointed at, and what was found there in words.
// The kernel is told where the pointer is, as fractions of the picture's width and height, and which arrow was pressed.

const STEPS = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
const MOVED = 24; // pixels: a change of the room smaller than this is no other layout

function render({model, el}) {
  el.classList.add("flakit-picture-box");
  const frame = document.createElement("div");
  frame.className = "flakit-frame";
  const image = document.createElement("img");
  image.className = "flakit-picture";
  image.setAttribute("role", "img");
  const strip = document.createElement("div");
  strip.className = "flakit-strip";
  strip.setAttribute("aria-live", "polite");
  frame.append(image);
  el.append(frame, strip);

  let shown = null;
  const draw = () => {
    const url = URL.createObjectURL(new Blob([model.get("png")], {type: "image/png"}));
    image.onload = () => {
      if (shown) URL.revokeObjectURL(shown);
      shown = url;
      place();
    };
    image.src = url;
  };
  const describe = () => {
    image.alt = model.get("alt");
    image.setAttribute("aria-label", model.get("alt"));
  };
  const size = () => {
    image.style.maxWidth = `${model.get("width")}px`;
    image.style.aspectRatio = `${model.get("width")} / ${model.get("height")}`;
  };
  // Lit places lie over the picture, so that pointing redraws nothing.
  const place = () => {
    frame.querySelectorAll(".flakit-lit").forEach(each => each.remove());
    for (const [look, x, y, width, height] of model.get("lit")) {
      const box = document.createElement("div");
      box.className = `flakit-lit flakit-lit-${look}`;
      box.style.left = `${x * image.clientWidth}px`;
      box.style.top = `${y * image.clientHeight}px`;
      box.style.width = `${width * image.clientWidth}px`;
      box.style.height = `${height * image.clientHeight}px`;
      frame.append(box);
    }
  };
  const say = () => {
    strip.textContent = model.get("strip");
    strip.style.display = model.get("points") ? "" : "none";
    image.tabIndex = model.get("points") ? 0 : -1;
    image.style.cursor = model.get("points") ? "crosshair" : "default";
  };

  // "save picture": the browser puts the PNG where it puts other files.
  const save = ({file}) => {
    if (!shown || !image.offsetParent) return; // another view of this panel is the one on the screen
    const link = document.createElement("a");
    [link.href, link.download] = [shown, file];
    link.click();
  };

  const tell = (kind, x, y) => model.send({kind, x, y});
  const at = event => {
    const box = image.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  };
  let waiting = null;
  image.addEventListener("pointermove", event => {
    if (!model.get("points")) return;
    const first = waiting === null;
    waiting = at(event);
    if (first) requestAnimationFrame(() => { tell("point", ...waiting); waiting = null; });
  });
  image.addEventListener("pointerleave", () => model.get("points") && tell("leave", 0, 0));
  image.addEventListener("click", event => { if (model.get("points")) { image.focus(); tell("pick", ...at(event)); } });
  image.addEventListener("keydown", event => {
    if (!model.get("points")) return;
    if (STEPS[event.key]) tell("step", ...STEPS[event.key]);
    else if (event.key === "Escape") tell("drop", 0, 0);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  // What the widgets leave without a name: a slider's handle has the words beside it, the player's buttons those of the
  // panel, and what the readout says is read aloud when it changes.
  const name = (control, words) => {
    if (words && control.getAttribute("aria-label") !== words) control.setAttribute("aria-label", words);
  };
  const nameControls = () => {
    const panel = el.closest(".flakit-panel");
    if (!panel) return;
    for (const slider of panel.querySelectorAll(".widget-slider")) {
      for (const handle of slider.querySelectorAll(".noUi-handle")) {
        name(handle, slider.querySelector(".widget-label")?.textContent);
        const value = slider.querySelector(".widget-readout")?.textContent;
        if (value && handle.getAttribute("aria-valuetext") !== value) handle.setAttribute("aria-valuetext", value);
      }
    }
    for (const icon of panel.querySelectorAll(".widget-play .jupyter-button > i")) {
      const which = Object.keys(model.get("names")).find(each => icon.classList.contains(`fa-${each}`));
      name(icon.parentElement, model.get("names")[which]);
    }
    panel.querySelector(".flakit-readout > .widget-html-content")?.setAttribute("aria-live", "polite");
  };

  // How much room there is for pictures decides how the next one is laid out.
  let told = 0;
  const room = new ResizeObserver(() => {
    const width = Math.floor((el.closest(".flakit-panel") ?? el).clientWidth);
    if (width > 0 && Math.abs(width - told) >= MOVED) tell("room", told = width, window.devicePixelRatio);
    place();
  });
  const watch = new MutationObserver(nameControls);
  // A busy browser puts a picture into its panel some frames after it was made.
  let next = requestAnimationFrame(function begin() {
    if (!el.isConnected) {
      next = requestAnimationFrame(begin);
      return;
    }
    const panel = el.closest(".flakit-panel") ?? el;
    room.observe(panel);
    room.observe(image);
    watch.observe(panel, {childList: true, subtree: true, characterData: true, attributes: true, attributeFilter: ["class"]});
    nameControls();
  });

  const listeners = {
    "change:png": draw, "change:alt": describe, "change:width": size, "change:height": size,
    "change:lit": place, "change:strip": say, "change:points": say,
    "msg:custom": save,
  };
  for (const [name, listen] of Object.entries(listeners)) model.on(name, listen);
  describe(); size(); say(); draw();
  return () => {
    for (const [name, listen] of Object.entries(listeners)) model.off(name, listen);
    cancelAnimationFrame(next);
    room.disconnect();
    watch.disconnect();
    if (shown) URL.revokeObjectURL(shown);
  };
}

export default {render};
