// A saved notebook that is opened again has the picture of each panel but not its kernel. JupyterLab then says "Error
// displaying widget: model not found", or "Loading widget..." as long as no kernel is chosen. This extension shows the
// picture and its words instead. Where JupyterLab is dark it turns the brightness of pictures round, which are drawn for
// a light page (figures/canvas.py, DARK). It is a module of the form that JupyterLab loads and needs no build.
(() => {
  const FAILED = /^Error displaying widget/;
  const LOADING = /^Loading widget/;
  const PAUSE = 1000; // milliseconds between two looks at all outputs, which take less than one
  const PATIENCE = 8000; // milliseconds after which a widget that is still loading counts as missing
  const WORDS = {
    en: "This is the stored picture. Run this cell to move it.",
    zh: "这是保存下来的图。运行这个单元后才能操作它。",
  };

  const DARK = `[data-jp-theme-light="false"] :is(img.jp-needs-light-background, .flakit-stored img) {
  filter: invert(0.89) hue-rotate(180deg); background: none
}`;

  const since = new WeakMap();
  function isMissing(node) {
    const loading = LOADING.test(node.textContent);
    if (!loading) since.delete(node);
    else if (!since.has(node)) since.set(node, performance.now());
    return FAILED.test(node.textContent) || (loading && performance.now() - since.get(node) > PATIENCE);
  }

  // The outputs of all open notebooks whose widget is missing, with what was stored beside it.
  function* missing(app) {
    for (const panel of app.shell.widgets("main")) {
      for (const {outputArea} of panel.content?.widgets ?? []) {
        if (!outputArea) continue;
        for (let n = 0; n < outputArea.model.length; n++) {
          const {data} = outputArea.model.get(n);
          if (!data["image/png"] || !data["application/vnd.jupyter.widget-view+json"]) continue;
          const nodes = outputArea.widgets[n]?.node.querySelectorAll(".jp-OutputArea-output") ?? [];
          for (const node of nodes) if (isMissing(node)) yield [node, data];
        }
      }
    }
  }

  function show(node, data) {
    const image = document.createElement("img");
    image.src = `data:image/png;base64,${data["image/png"]}`;
    image.alt = data["text/plain"] ?? "";
    image.style.maxWidth = "100%"; // of a window narrower than the one it was drawn for
    const words = document.createElement("p");
    words.textContent = WORDS[/[\u4e00-\u9fff]/.test(image.alt) ? "zh" : "en"];
    words.style.margin = "4px 0";
    const stored = document.createElement("div");
    stored.className = "flakit-stored";
    stored.append(image, words);
    node.replaceChildren(stored);
  }

  const activate = app => {
    const style = document.createElement("style");
    style.textContent = DARK;
    document.head.append(style);
    setInterval(() => { for (const [node, data] of missing(app)) show(node, data); }, PAUSE);
  };

  window._JUPYTERLAB = window._JUPYTERLAB ?? {};
  window._JUPYTERLAB.flakit = {
    init: () => {},
    get: () => Promise.resolve(() => ({default: {id: "flakit:stored-pictures", autoStart: true, activate}, __esModule: true})),
  };
})();
