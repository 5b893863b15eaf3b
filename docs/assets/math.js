// Formulas are MathML when the page arrives. Where KaTeX can be loaded they are set again with its fonts.
(() => {
  const base = "https://cdn.jsdelivr.net/npm/katex@0.16.22/dist/";
  const formulas = document.querySelectorAll(".tex");
  if (!formulas.length) return;
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = base + "katex.min.css";
  style.integrity = "sha384-5TcZemv2l/9On385z///+d7MSYlvIEw9FuZTIdZ14vJLqWphw7e7ZPuOiCHJcFCP";
  style.crossOrigin = "anonymous";
  const script = document.createElement("script");
  script.src = base + "katex.min.js";
  script.integrity = "sha384-cMkvdD8LoxVzGF/RPUKAcvmm49FQ0oxwDF3BGKtDXcEc+T1b2N+teh/OJfpU0jr6";
  script.crossOrigin = "anonymous";
  const set = () => formulas.forEach((element) => {
    const rendered = document.createElement("span");
    try {
      window.katex.render(element.dataset.tex, rendered, { displayMode: element.dataset.display === "1" });
    } catch {
      return; // the MathML stays
    }
    element.replaceChildren(rendered);
  });
  // Without its style sheet KaTeX shows every formula twice, so both must be there.
  const loaded = (element) => new Promise((resolve, reject) => { element.onload = resolve; element.onerror = reject; });
  Promise.all([loaded(style), loaded(script)]).then(set, () => style.remove());
  document.head.append(style, script);
})();
