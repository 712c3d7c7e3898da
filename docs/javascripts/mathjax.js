window.MathJax = {
  tex: {
    inlineMath: [["\\(", "\\)"]],
    displayMath: [["\\[", "\\]"]],
    processEscapes: true,
    processEnvironments: true,
  },
  options: {
    ignoreHtmlClass: ".*|",
    processHtmlClass: "arithmatex",
  },
};

// Where MathJax could not be fetched: sub- and superscripts, sums, roots and bars are all that these pages use.
window.addEventListener("load", () => {
  if (window.MathJax.version !== undefined) return;
  for (const formula of document.querySelectorAll(".arithmatex")) {
    const text = formula.textContent.trim().replace(/^\\[[(]/, "").replace(/\\[\])]$/, "").trim();
    const safe = text.replace(/&/g, "&amp;").replace(/</g, "&lt;");
    const typeset = safe
      .replace(/\\bar\{([^}]*)\}/g, "$1\u0304")
      .replace(/\\sum/g, "∑")
      .replace(/\\sqrt\{([^}]*)\}/g, "√($1)")
      .replace(/_(?:\{([^}]*)\}|(\S))/g, (_, group, single) => `<sub>${group ?? single}</sub>`)
      .replace(/\^(?:\{([^}]*)\}|(\S))/g, (_, group, single) => `<sup>${group ?? single}</sup>`);
    formula.innerHTML = `<span style="font: italic 1.05em serif; white-space: nowrap">${typeset}</span>`;
  }
});
